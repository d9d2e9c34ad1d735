"""``aotgaudi build capture``: runs another server, and seals what it compiled after that has been proved."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from aotgaudi.bundle.launch import Launch, WarmUpLevel, WarmUpRequest
from aotgaudi.bundle.signing import Signing
from aotgaudi.bundle.staging import refuse_foreign
from aotgaudi.cli.build_options import remote_line, remote_options, signing_options
from aotgaudi.cli.from_vllm import KeptFile
from aotgaudi.cli.options import (
    FiniteRange,
    StorePlace,
    json_option,
    option,
    options_of,
    path_option,
    store_options,
)
from aotgaudi.cli.progress import CaptureDisplay
from aotgaudi.cli.show import first_lines
from aotgaudi.commands.starts import PlainCommand
from aotgaudi.errors import counted
from aotgaudi.gaudi.live_graphs import not_closed
from aotgaudi.share.remote_cache import Sharing
from aotgaudi.spec.parse import load_spec
from aotgaudi.wrap.capture import READY_SECONDS, Built, CaptureRequest, build_capture, build_shard
from aotgaudi.wrap.capture_records import MAX_SHARDS, Sharding, parse_shard
from aotgaudi.wrap.exercise import LEVELS, read_requests
from aotgaudi.wrap.launch import ServerCommand, describe, shaped_command
from aotgaudi.wrap.sandbox import DEFAULT_ROOT

_SHOWN_RESIDUALS = 3


@dataclass(frozen=True)
class CaptureSettings:
    """How a server is captured: warm-up requests, repairs, where its caches lie, how long it may take."""

    exercise: tuple[str, ...] = option(
        "Warm-up requests to send once the server is healthy: none, smoke, sampler or"
        " shapes, and a file of your own requests (JSONL, as OpenAI's batches have them)"
        "  [default: sampler; with --shapes: shapes]",
        default=(),
        metavar="LEVEL|FILE",
    )
    no_repairs: bool = option("Do not apply workarounds for known vLLM bugs.", default=False)
    shapes: Path | None = option(
        "Have the server compile the closed, proved shapes of this spec (vllm-gaudi, SGLang).",
        metavar="SPEC",
    )
    sandbox_root: Path = option(
        "Where the server's caches lie, now and wherever it runs: its files hold this path.",
        "--root",
        default=DEFAULT_ROOT,
        metavar="DIR",
    )
    shards: int | None = option(
        "Warm up in N parts, a server for each, one after another; parts in the store are not repeated (vllm-gaudi).",
        type=click.IntRange(1, MAX_SHARDS),
        metavar="N",
    )
    shard: str | None = option(
        "Warm up part I of N only, and leave what it compiles in the store for --merge.", metavar="I/N"
    )
    merge: bool = option(
        "With --shards: run none, but take what --shard I/N left in the store.", default=False
    )
    ready_seconds: float = option(
        "How long a start may take until the server serves.",
        "--ready-timeout",
        default=READY_SECONDS,
        type=FiniteRange(min=1),
        metavar="SECONDS",
    )

    @property
    def level(self) -> WarmUpLevel:
        """The level of warm-up requests: the last one that was given."""
        given = [level for text in self.exercise for level in LEVELS if level == text]
        return given[-1] if given else "sampler" if self.shapes is None else "shapes"

    def check(self, has_output: bool) -> None:
        """Raises UsageError or SpecError for options that do not go together."""
        if self.shard is not None:
            parse_shard(self.shard)
        if self.shards is not None and self.shard is not None:
            raise click.UsageError("--shards runs all parts, --shard I/N one: give one of them.")
        if self.merge and self.shards is None:
            raise click.UsageError("--merge needs --shards N, which says how many parts there are.")
        if not has_output and self.shard is None:
            raise click.UsageError("Missing option '-o' / '--output'.")

    @property
    def sharding(self) -> Sharding | None:
        """How several servers share the first start."""
        return None if self.shards is None else Sharding(self.shards, runs=not self.merge)

    def own_requests(self) -> tuple[WarmUpRequest, ...]:
        """Returns the requests in the user's files. Raises SpecError."""
        files = [Path(text) for text in self.exercise if text not in LEVELS]
        return tuple(request for file in files for request in read_requests(file))


@click.command("capture")
@click.argument("words", metavar="-- COMMAND...", nargs=-1, type=click.UNPROCESSED)
@path_option("-o", "--output", metavar="DIR", help="The bundle. Required without --shard.")
@options_of(KeptFile, "kept")
@options_of(CaptureSettings, "settings")
@signing_options
@store_options
@remote_options
@json_option("Print what was built as JSON.")
def capture(
    words: tuple[str, ...],
    output: Path | None,
    kept: KeptFile,
    settings: CaptureSettings,
    signing: Signing | None,
    place: StorePlace,
    sharing: Sharing | None,
    as_json: bool,
) -> None:
    """Run COMMAND, a server such as `vllm serve MODEL`, and seal what it compiled into DIR.

    It is started twice: from empty caches, and from what the first start left, alone. Only if the second one compiles
    nothing, makes no code and adds no file is anything sealed (else exit code 6). A launch that was captured before is
    only sealed again.

    With --shards N, N servers warm up a part of the buckets each, and a last one, from what they compiled, gets all
    requests.
    """
    of_file = kept.read(os.environ)
    plain = of_file or PlainCommand(words=words)
    if bool(words) is (of_file is not None):
        raise click.UsageError(
            "Give COMMAND or a file with it." if words else "Missing argument '-- COMMAND...'."
        )
    settings.check(output is not None)
    if output is not None:
        refuse_foreign(output)
    display = CaptureDisplay(is_quiet=as_json)
    spec = None if settings.shapes is None else load_spec(settings.shapes)
    environ = {**os.environ, **plain.variables}
    shaped = shaped_command(plain.words, environ, spec, settings.sandbox_root)
    found = shaped.found
    launch = describe(
        found,
        root=str(settings.sandbox_root),
        asked=shaped.asked(settings.level, settings.own_requests()),
        repairs=() if settings.no_repairs else None,
        manifest_id=shaped.shapes.manifest_id,
    )
    for note in (*plain.notes, *found.notes):
        display.line("command", note)
    display.line("launch", _launch_line(found, launch))
    store = place.open()
    request = CaptureRequest(
        found=found,
        launch=launch,
        out=output or Path(),
        signing=signing,
        ready_seconds=settings.ready_seconds,
        given=shaped.shapes.files,
        sharding=settings.sharding,
        live_graphs=shaped.live_graphs(launch.exercise),
    )
    try:
        if settings.shard is not None:
            build_shard(request, *parse_shard(settings.shard), store, display)
            return
        built = build_capture(request, store, display, sharing)
    finally:
        display.clear()
    if as_json:
        click.echo(json.dumps(_document(launch, built, signing), indent=2))
        return
    _show(display, found, launch, built)
    display.line("sealed", _sealed_line(built, signing))


def _show(display: CaptureDisplay, found: ServerCommand, launch: Launch, built: Built) -> None:
    """Writes what there is to say about a capture."""
    for repair in found.adapter.repairs:
        if repair.id in launch.repairs:
            display.line("repairs", f"{repair.id} ({repair.defect.partition('. ')[0].rstrip('.')})")
    receipt = built.bundle.require_capture()
    for heading, said in (("again", receipt.residuals), ("not asked", receipt.not_exercised)):
        for line in first_lines(said, _SHOWN_RESIDUALS, "and {} more, in the receipt"):
            display.line(heading, line)
    for line in not_closed(receipt.live_graphs):
        display.line("live", f"not closed: {line}")
    if receipt.start is not None:
        display.line("start", str(receipt.start))
    if built.remote is not None:
        display.line("remote", remote_line(built.remote))


def _launch_line(found: ServerCommand, launch: Launch) -> str:
    version = next((v.partition(" ")[0] for n, v in launch.software.items() if n == launch.guest), "")
    config = next(iter(launch.model.files.values()))
    name = " ".join(filter(None, (launch.guest, version)))
    return (
        f"{name} ({launch.target.backend}), {counted(len(launch.flags), 'flag')},"
        f" {counted(len(launch.variables), 'variable')},"
        f" model {found.flags.address.served_name} {config.sha256[:8]}..., id {launch.id[:12]}..."
    )


def _sealed_line(built: Built, signing: Signing | None) -> str:
    counts = built.bundle.index.counts
    signed = ", signed" if signing is not None else ""
    before = "" if built.is_new else " (captured before; nothing was run)"
    return f"{built.bundle.path}: {counts.units} files, {counts.object_bytes / 1e6:.1f} MB{signed}{before}"


def _document(launch: Launch, built: Built, signing: Signing | None) -> dict[str, Any]:
    counts, row, receipt = built.bundle.index.counts, built.row, built.bundle.require_capture()
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
        "not_exercised": list(receipt.not_exercised),
        "live_graphs": [row.model_dump() for row in receipt.live_graphs],
        "start": None if receipt.start is None else receipt.start.model_dump(),
        **({} if built.remote is None else {"remote": asdict(built.remote)}),
    }
