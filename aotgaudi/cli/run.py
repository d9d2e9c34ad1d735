"""``aotgaudi run``: runs another server from its sealed caches, and watches it while it runs."""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aotgaudi.cli.options import LOG_FORMAT, FiniteRange, acceptance_options, option, options_of, path_option
from aotgaudi.server.options import Observability
from aotgaudi.wrap.run_options import START_SECONDS, Listen, OnCompile, Policy, RunOptions, parse_listen
from aotgaudi.wrap.starts import Asking, begin

if TYPE_CHECKING:
    from aotgaudi.bundle.trust import TrustPolicy

_BEGAN = time.monotonic()
_ASKING = "aotgaudi.asking"


@dataclass(frozen=True, kw_only=True)
class _Supervision:
    """How a wrapped server is supervised; see `aotgaudi.wrap.run_options.RunOptions`."""

    on_compile: OnCompile = option(
        "Whether a compile after ready is only counted and logged, or ends the server.", default="report"
    )
    no_exercise: bool = option("Be ready without asking what was asked in the build.", default=False)
    no_repairs: bool = option("Do not apply workarounds for known vLLM bugs.", default=False)
    root: Path | None = option("Where the server's caches lie  [default: as in the build]", metavar="DIR")
    listen: str = option(
        "Where /ready, /live, /metrics and /report are answered.", default=str(Listen()), metavar="HOST:PORT"
    )
    report_public: bool = option("Answer /report to other machines, too.", default=False)
    start_seconds: float = option(
        "How long the server may take until it serves.",
        "--ready-timeout",
        default=START_SECONDS,
        type=FiniteRange(min=1),
        metavar="SECONDS",
    )


class CommandThatAsks(click.Command):
    """First puts the question to the interpreter of the server in ``words``, which answers while we import and verify."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        asking = begin(ctx.params["words"], os.environ)
        if asking is None:
            return super().invoke(ctx)
        ctx.meta[_ASKING] = asking
        with asking:
            return super().invoke(ctx)


@click.command(cls=CommandThatAsks, short_help="Run a server from its sealed caches.")
@path_option("--bundle", required=True, metavar="DIR", help="What `build capture` sealed.")
@click.option(
    "--require-warm", is_flag=True, help="Serve warm or not at all: end the server unless it is proved warm."
)
@options_of(_Supervision, "supervision")
@options_of(Observability, "observability", log_format=LOG_FORMAT)
@acceptance_options
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND]")
def run(
    *,
    bundle: Path,
    require_warm: bool,
    supervision: _Supervision,
    observability: Observability,
    acceptance: TrustPolicy,
    words: tuple[str, ...],
) -> None:
    """Run COMMAND, a server such as `vllm serve MODEL ...`, from the caches that BUNDLE holds; without it, the sealed one.

    The bundle is verified, this launch is compared with the sealed one, and the files are restored into a sandbox while
    they are hashed. The server is started there and watched from inside and outside. GET /ready says 200 when it serves,
    has answered the sealed warm-up requests again, and nothing speaks against its being warm.

    Exit codes: the server's own (128 + n for signal n); before it is ready 2 usage, 3 not warm, 4 corrupt or untrusted,
    5 another machine or other software.
    """
    from aotgaudi.server.log import log_handler
    from aotgaudi.wrap.run import run as run_server  # Only now, while the interpreter answers.

    logging.basicConfig(
        level=logging.INFO, handlers=[log_handler(sys.stderr, observability.log_format, teller="aotgaudi")]
    )
    logging.captureWarnings(observability.log_format == "json")
    policy = Policy(
        require_warm=require_warm,
        on_compile=supervision.on_compile,
        start_seconds=supervision.start_seconds,
    )
    options = RunOptions(
        bundle=bundle,
        words=words,
        environ=dict(os.environ),
        acceptance=acceptance,
        policy=policy,
        exercises=not supervision.no_exercise,
        repairs=not supervision.no_repairs,
        root=supervision.root,
        listen=parse_listen(supervision.listen, report_public=supervision.report_public),
        began=_BEGAN,
        asking=_asked_ahead(),
    )
    raise click.exceptions.Exit(run_server(options))


def _asked_ahead() -> Asking | None:
    """Returns the question that this command has put to an interpreter, if any."""
    context = click.get_current_context(silent=True)
    found = None if context is None else context.meta.get(_ASKING)
    return found if isinstance(found, Asking) else None
