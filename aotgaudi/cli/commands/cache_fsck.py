"""``aotgaudi cache fsck``: re-hashes the whole store, and puts what is bad in quarantine."""

from __future__ import annotations

import json
from typing import Any

import click

from aotgaudi.cli.options.common import jobs_option
from aotgaudi.cli.options.store import StorePlace, store_options
from aotgaudi.errors import CorruptError
from aotgaudi.store.fsck import FsckReport, Loss, check_store

_MOST_LINES = 20


@click.command("fsck")
@store_options
@jobs_option
@click.option("--dry-run", is_flag=True, help="Leave what is bad where it is.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def fsck(context: click.Context, place: StorePlace, jobs: int, dry_run: bool, as_json: bool) -> None:
    """Verify every object and record. Builders may go on working meanwhile.

    Exits with 0 if all is sound, and with 4 if something was bad: it is then in quarantine, and building mends it.
    """
    store = place.open(create=False)
    report = check_store(store, jobs, move=not dry_run)
    if as_json:
        click.echo(json.dumps(_document(report), indent=2))
    else:
        click.echo("\n".join(_lines(report)), err=not report.is_clean)
    context.exit(0 if report.is_clean else CorruptError.exit_code)


def describe_loss(loss: Loss) -> str:
    """Names what a rebuild would restore, for people: a unit by its label, a program by its entry."""
    label = loss.value.get("label")
    if isinstance(label, str):
        return label
    components = loss.value.get("components")
    if isinstance(components, dict):
        entry = [str(value) for name, value in components.items() if str(name).startswith("entry.")]
        return f"trace of {' '.join(entry)}"
    return f"record {loss.key:.12}"


def _document(report: FsckReport) -> dict[str, Any]:
    return {
        "clean": report.is_clean,
        "num_objects": report.num_objects,
        "num_records": report.num_records,
        "object_bytes": report.object_bytes,
        "damage": [
            {"path": item.path, "reason": item.reason, "moved_to": item.moved_to} for item in report.damage
        ],
        "rebuild": [
            {
                "key": loss.key,
                "what": describe_loss(loss),
                "missing": [str(digest) for digest in loss.missing],
            }
            for loss in report.losses
        ],
    }


def _lines(report: FsckReport) -> list[str]:
    head = f"fsck: {report.num_objects} objects ({report.object_bytes} bytes) and {report.num_records} records read"
    if report.is_clean and not report.losses:
        return [f"{head}: all sound"]
    lines = [f"{head}: {len(report.damage)} bad"]
    lines += _first(
        [
            f"  {item.path}: {item.reason}" + (f" -> {item.moved_to}" if item.moved_to else "")
            for item in report.damage
        ]
    )
    if report.losses:
        lines.append(f"{len(report.losses)} results lack an object; building them again mends:")
        lines += _first([f"  {describe_loss(loss)}" for loss in report.losses])
    return lines


def _first(lines: list[str]) -> list[str]:
    rest = len(lines) - _MOST_LINES
    return lines if rest <= 0 else [*lines[:_MOST_LINES], f"  and {rest} more (--json)"]
