"""How a wrapped server is supervised: what is demanded, what becomes of a live compile, where it lives, where we answer."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from aotgaudi.cli.options.common import Command, FiniteRange, with_options
from aotgaudi.wrap.run_options import START_SECONDS, Listen, OnCompile, parse_listen


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """What was chosen; see `aotgaudi.wrap.readiness.RunOptions`."""

    on_compile: OnCompile
    exercises: bool
    repairs: bool
    root: Path | None
    listen: Listen
    start_seconds: float


_OPTIONS = (
    click.option(
        "--on-compile",
        type=click.Choice(["report", "drain", "exit", "refuse"]),
        default="report",
        show_default=True,
        help="What a compile after ready does besides being counted: nothing; /ready says 503; the server is ended; or the "
        "compile raises where it starts, which may end the server.",
    ),
    click.option("--no-exercise", is_flag=True, help="Be ready without asking what was asked in the build."),
    click.option("--no-repairs", is_flag=True, help="Mend no defect of the server."),
    click.option(
        "--root",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Where the server sees its caches  [default: as in the build]",
    ),
    click.option(
        "--listen",
        default=str(Listen()),
        show_default=True,
        metavar="HOST:PORT",
        help="Where /ready, /live, /metrics and /report are answered.",
    ),
    click.option("--report-public", is_flag=True, help="Answer /report to other machines, too."),
    click.option(
        "--ready-timeout",
        "start_seconds",
        type=FiniteRange(min=1),
        default=START_SECONDS,
        show_default=True,
        metavar="SECONDS",
        help="How long the server may take until it serves.",
    ),
)


SUPERVISION_NAMES = frozenset(
    {"on_compile", "no_exercise", "no_repairs", "root", "listen", "report_public", "start_seconds"}
)
"""The parameters that `supervision_options` adds."""


def supervision_options(function: Command) -> Command:
    """Adds the options; the command gets them as one argument `supervision`."""

    @functools.wraps(function)
    def command(
        *,
        on_compile: OnCompile,
        no_exercise: bool,
        no_repairs: bool,
        root: Path | None,
        listen: str,
        report_public: bool,
        start_seconds: float,
        **others: Any,
    ) -> Any:
        supervision = Supervision(
            on_compile=on_compile,
            exercises=not no_exercise,
            repairs=not no_repairs,
            root=root,
            listen=parse_listen(listen, report_public=report_public),
            start_seconds=start_seconds,
        )
        return function(supervision=supervision, **others)

    return with_options(command, _OPTIONS)
