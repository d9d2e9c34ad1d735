"""``aotgaudi verify``: is a bundle what was sealed, and does it answer every entry of its manifest?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from aotgaudi.bundle.bundle import Acceptance, Bundle, open_bundle
from aotgaudi.bundle.verify import Report, verify_bundle
from aotgaudi.cli.options.acceptance import acceptance_options
from aotgaudi.errors import CorruptError, NotWarmError
from aotgaudi.manifest.codec import loads


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@acceptance_options
@click.pass_context
def verify(context: click.Context, bundle: Path, as_json: bool, acceptance: Acceptance) -> None:
    """Re-hash every object of BUNDLE and check that every entry of its manifest is answered.

    Exits with 0 when the bundle is whole, 3 when entries are missing, 4 when something is corrupt, or not trusted.
    """
    opened = open_bundle(bundle, acceptance)
    report = verify_bundle(opened, _labels(opened))
    failure = _failure(report, bundle)
    if as_json:
        click.echo(json.dumps(_document(opened, report), indent=2))
    elif failure is None:
        click.echo(_summary(opened, report))
    else:
        click.echo(f"error: {failure}", err=True)  # A table: it would not survive as one line.
    context.exit(0 if failure is None else failure.exit_code)


def _failure(report: Report, path: Path) -> CorruptError | NotWarmError | None:
    try:
        report.raise_if_bad(path)
    except (CorruptError, NotWarmError) as error:
        return error
    return None


def _labels(bundle: Bundle) -> dict[str, str]:
    """The manifest's entries: id -> label. Raises CorruptError when the receipt answers another manifest."""
    manifest = loads(bundle.manifest_bytes)
    if manifest.id != bundle.receipt.manifest_id:
        raise CorruptError(
            f"bundle {bundle.path}: manifest.json has id {manifest.id},"
            f" the receipt answers {bundle.receipt.manifest_id}"
        )
    return {entry.id: str(entry) for entry in manifest.entries}


def _summary(bundle: Bundle, report: Report) -> str:
    target = bundle.receipt.target
    rows = (
        ("bundle", f"{bundle.path}: intact"),
        ("manifest", bundle.receipt.manifest_id),
        ("target", f"{target.backend} {target.machine}"),
        ("entries", f"{report.num_entries}, all answered"),
        ("objects", f"{report.num_objects}, {report.object_bytes} bytes, all re-hashed"),
        ("signed", _signed(bundle)),
    )
    return "\n".join(f"{name:10}{value}" for name, value in rows)


def _signed(bundle: Bundle) -> str:
    if bundle.statement is None or bundle.acceptance.trust is None:
        return "not asked for (--trusted-key)"
    trust = bundle.acceptance.trust
    return f"by {trust.threshold} or more of {len(trust.keys)} trusted keys, epoch {bundle.statement.epoch}"


def _document(bundle: Bundle, report: Report) -> dict[str, Any]:
    return {
        "bundle": str(bundle.path),
        "intact": report.is_intact,
        "manifest_id": bundle.receipt.manifest_id,
        "backend": bundle.index.backend,
        "epoch": None if bundle.statement is None else bundle.statement.epoch,
        **dataclasses.asdict(report),
    }
