"""``aotgaudi build capture``: runs a server that is not ours, and seals what it compiled once that has been proved."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from aotgaudi.bundle.launch import Launch
from aotgaudi.bundle.signing import Signing
from aotgaudi.bundle.staging import refuse_foreign
from aotgaudi.cli.options.capture import CaptureSettings, capture_options
from aotgaudi.cli.options.signing import signing_options
from aotgaudi.cli.options.store import StorePlace, store_options
from aotgaudi.cli.progress import CaptureDisplay
from aotgaudi.spec.parse import load_spec
from aotgaudi.wrap.capture import Built, Order, build_capture, shaped_command
from aotgaudi.wrap.launch import Found, describe

_SHOWN_RESIDUALS = 3


@click.command("capture")
@click.argument("words", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, metavar="DIR", help="The bundle."
)
@capture_options
@signing_options
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print what was built as JSON.")
def capture(
    words: tuple[str, ...],
    output: Path,
    settings: CaptureSettings,
    signing: Signing | None,
    place: StorePlace,
    as_json: bool,
) -> None:
    """Run COMMAND, a server such as `vllm serve MODEL`, and seal what it compiled into DIR.

    It is started twice: from empty caches, and from what the first start left, alone. Only if the second one compiles
    nothing, makes no code and adds no file is anything sealed (else exit code 6). A launch that was captured before is
    only sealed again.
    """
    refuse_foreign(output)
    display = CaptureDisplay(is_quiet=as_json)
    spec = None if settings.shapes is None else load_spec(settings.shapes)
    shaped = shaped_command(words, dict(os.environ), spec, settings.root)
    found = shaped.found
    launch = describe(
        found,
        root=str(settings.root),
        asked=shaped.asked(settings.level),
        repairs=settings.repairs,
        manifest_id=shaped.manifest_id,
    )
    display.line("launch", _launch_line(found, launch))
    store = place.open()
    order = Order(
        found=found,
        launch=launch,
        out=output,
        signing=signing,
        ready_seconds=settings.ready_seconds,
        given=shaped.files,
    )
    try:
        built = build_capture(order, store, display)
    finally:
        display.clear()
    if as_json:
        click.echo(json.dumps(_document(launch, built, signing), indent=2))
        return
    for repair in found.adapter.repairs:
        if repair.id in launch.repairs:
            display.line("repairs", f"{repair.id} ({repair.defect.partition('. ')[0].rstrip('.')})")
    for line in residual_lines(built.bundle.require_capture().residuals):
        display.line("again", line)
    display.line("sealed", _sealed_line(built, signing))


def _launch_line(found: Found, launch: Launch) -> str:
    version = next((v.partition(" ")[0] for n, v in launch.software.items() if n == launch.guest), "")
    config = next(iter(launch.model.files.values()))
    name = " ".join(filter(None, (launch.guest, version)))
    return (
        f"{name} ({launch.target.backend}), {_num(len(launch.flags), 'flag')},"
        f" {_num(len(launch.variables), 'variable')},"
        f" model {found.flags.served_name} {config.sha256[:8]}..., id {launch.id[:12]}..."
    )


def _num(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def residual_lines(residuals: Sequence[str]) -> Iterator[str]:
    """Yields what every start does again, a line each; of many the first ones, and how many others there are."""
    yield from residuals[:_SHOWN_RESIDUALS]
    if len(residuals) > _SHOWN_RESIDUALS:
        yield f"and {len(residuals) - _SHOWN_RESIDUALS} more, in the receipt"


def _sealed_line(built: Built, signing: Signing | None) -> str:
    counts = built.bundle.index.counts
    signed = f", signed, epoch {signing.epoch}" if signing is not None else ""
    before = "" if built.is_new else " (captured before; nothing was run)"
    return f"{built.bundle.path}: {counts.units} files, {counts.object_bytes / 1e6:.1f} MB{signed}{before}"


def _document(launch: Launch, built: Built, signing: Signing | None) -> dict[str, Any]:
    counts, row = built.bundle.index.counts, built.row
    return {
        "bundle": str(built.bundle.path),
        "launch_id": launch.id,
        "guest": launch.guest,
        "is_new": built.is_new,
        "num_files": counts.units,
        "object_bytes": counts.object_bytes,
        "cold_seconds": row.cold_seconds,
        "warm_seconds": row.warm_seconds,
        "build_seconds": row.build_seconds,
        "cold_counts": row.cold_counts,
        "repairs": list(launch.repairs),
        "epoch": None if signing is None else signing.epoch,
    }
