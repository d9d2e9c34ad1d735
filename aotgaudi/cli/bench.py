"""``aotgaudi bench startup``: how a start spends its time, compared with the floor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aotgaudi.bundle.kind import is_capture
from aotgaudi.cli.options import CommandWithWords, json_option, path_option
from aotgaudi.cli.serving_options import find_model
from aotgaudi.cli.show import emit

if TYPE_CHECKING:
    from aotgaudi.bench.startup import Startup

_BAR_WIDTH = 40


@click.command("startup", cls=CommandWithWords)
@path_option("--bundle", required=True, metavar="DIR", help="What `build` sealed.")
@click.option("--model", required=True, metavar="DIR", help="Model directory (or hub id).")
@click.option(
    "--runs", type=click.IntRange(min=1), default=5, show_default=True, metavar="N", help="How many starts."
)
@json_option("Print the measurement as JSON.")
def bench_startup(bundle: Path, model: str, runs: int, as_json: bool, words: tuple[str, ...]) -> None:
    """Start `serve --require-warm` N times, and show its phases beside the floor.

    The floor is a process that does the least that any server of this bundle and model must do, one after the other: import
    torch, Starlette and uvicorn, map the weights, read and hash the bundle, load the tokenizer. Options of `serve` may
    follow --.
    """
    from aotgaudi.bench.startup import Subject, measure

    directory = find_model(model)
    if is_capture(bundle):
        raise click.UsageError(
            f"{bundle} holds a capture of another server: only bundles of programs have phases"
        )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subject = Subject(bundle.absolute(), directory.absolute(), environment, words)
    found = measure(subject, runs, lambda done: click.echo(f"{done} of {runs} starts", err=True))
    emit(startup_document(found), as_json, startup_lines(found))


def startup_document(found: Startup) -> dict[str, Any]:
    """Returns a measurement as a JSON value, in seconds."""
    return {
        "runs": len(found.starts),
        "ready": found.ready.json(),
        "floor": found.floor.json(),
        "ready_to_floor": found.ready.median / found.floor.median,
        "phases": [
            {"phase": name, "begin": begin.json(), "end": end.json(), "seconds": seconds.json()}
            for name, (begin, end, seconds) in found.phases.items()
        ],
    }


def startup_lines(found: Startup) -> list[str]:
    """Returns the same for people: one row per phase, with a bar for its time between the start and ready."""
    ready, floor = found.ready, found.floor
    scale = max([ready.median, *(end.median for _, end, _ in found.phases.values())])
    lines = [f"{'phase':<14} {'begin':>6} {'end':>6}  {'seconds (min to max)':<22}"]
    for name, (begin, end, seconds) in found.phases.items():
        bar = _bar(begin.median / scale, end.median / scale)
        lines.append(
            f"{name:<14} {begin.median:>6.2f} {end.median:>6.2f}  {seconds.text():<22} {bar}".rstrip()
        )
    lines.append(f"{'ready':<14} {'':>6} {'':>6}  {ready.text()}")
    lines.append(f"{'floor':<14} {'':>6} {'':>6}  {floor.text()}")
    lines.append(
        f"ready is {ready.median / floor.median:.2f} x the floor; {len(found.starts)} starts of each, alternating, after "
        "one of each to fill the page cache"
    )
    return lines


def _bar(begin: float, end: float) -> str:
    first = int(begin * _BAR_WIDTH)
    return " " * first + "=" * max(1, round((end - begin) * _BAR_WIDTH))
