"""How a server is captured: what it is asked, whether it is mended, where it sees its caches, how long it may take."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from aotgaudi.bundle.launch import WARM_UP_LEVELS, WarmUpLevel
from aotgaudi.cli.options.common import Command, FiniteRange, with_options
from aotgaudi.wrap.capture import READY_SECONDS
from aotgaudi.wrap.sandbox import DEFAULT_ROOT


@dataclass(frozen=True)
class CaptureSettings:
    """What was chosen; `repairs` None means all that the guest has, `shapes` is a spec."""

    level: WarmUpLevel
    repairs: tuple[str, ...] | None
    root: Path
    ready_seconds: float
    shapes: Path | None = None


_OPTIONS = (
    click.option(
        "--exercise",
        "level",
        type=click.Choice(WARM_UP_LEVELS),
        help="What the server is asked once it serves, so that it compiles that, too"
        "  [default: sampler; with --shapes: shapes]",
    ),
    click.option(
        "--no-repairs", is_flag=True, help="Mend no defect that keeps the server from loading what it saved."
    ),
    click.option(
        "--shapes",
        type=click.Path(path_type=Path),
        metavar="SPEC",
        help="Have the server compile the closed, proved shapes of this spec (vllm-gaudi, SGLang).",
    ),
    click.option(
        "--root",
        type=click.Path(path_type=Path),
        default=DEFAULT_ROOT,
        show_default=True,
        metavar="DIR",
        help="Where the server sees its caches, now and wherever it runs: its files hold this path.",
    ),
    click.option(
        "--ready-timeout",
        type=FiniteRange(min=1),
        default=READY_SECONDS,
        show_default=True,
        metavar="SECONDS",
        help="How long a start may take until the server serves.",
    ),
)


def capture_options(function: Command) -> Command:
    """Adds the options; the command gets them as one argument `settings`."""

    @functools.wraps(function)
    def command(
        *,
        level: WarmUpLevel | None,
        no_repairs: bool,
        root: Path,
        ready_timeout: float,
        shapes: Path | None,
        **others: Any,
    ) -> Any:
        asked = level or ("sampler" if shapes is None else "shapes")
        settings = CaptureSettings(asked, () if no_repairs else None, root, ready_timeout, shapes)
        return function(settings=settings, **others)

    return with_options(command, _OPTIONS)
