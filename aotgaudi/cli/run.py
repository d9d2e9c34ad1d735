"""``aotgaudi run``: runs another server from its sealed caches, and watches it while it runs."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aotgaudi.cli.options import options_of, path_option
from aotgaudi.cli.serving_options import LOG_FORMAT, Supervision, acceptance_options
from aotgaudi.server.options import LogFormat, Observability
from aotgaudi.wrap.interpreter import Asking, begin
from aotgaudi.wrap.run_options import Policy, RunOptions, parse_listen

if TYPE_CHECKING:
    from aotgaudi.bundle.trust import TrustPolicy

_BEGAN = time.monotonic()
_ASKING = "aotgaudi.asking"


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
@options_of(Supervision, "supervision")
@options_of(Observability, "observability", log_format=LOG_FORMAT)
@acceptance_options
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND")
def run(
    *,
    bundle: Path,
    require_warm: bool,
    supervision: Supervision,
    observability: Observability,
    acceptance: TrustPolicy,
    words: tuple[str, ...],
) -> None:
    """Run COMMAND, a server such as `vllm serve MODEL ...`, from the caches that BUNDLE holds.

    The bundle is verified, this launch is compared with the sealed one, and the files are restored into a sandbox while
    they are hashed. The server is started there and watched from inside and outside. GET /ready says 200 when it serves,
    has answered the sealed warm-up requests again, and nothing speaks against its being warm.

    Exit codes: the server's own (128 + n for signal n); before it is ready 2 usage, 3 not warm, 4 corrupt or untrusted,
    5 another machine or other software.
    """
    supervise(bundle, require_warm, supervision, acceptance, words=words, log_format=observability.log_format)


def supervise(
    bundle: Path,
    require_warm: bool,
    supervision: Supervision,
    acceptance: TrustPolicy,
    *,
    words: tuple[str, ...] = (),
    extra_words: tuple[str, ...] = (),
    log_format: LogFormat = "text",
) -> None:
    """Runs a server and exits with its exit code. `serve` uses this too, with the sealed command."""
    from aotgaudi.server.log import log_handler
    from aotgaudi.wrap.run import run as run_server  # Only now, while the interpreter answers.

    logging.basicConfig(level=logging.INFO, handlers=[log_handler(sys.stderr, log_format, teller="aotgaudi")])
    logging.captureWarnings(log_format == "json")
    policy = Policy(
        require_warm=require_warm,
        on_compile=supervision.on_compile,
        start_seconds=supervision.start_seconds,
    )
    options = RunOptions(
        bundle=bundle,
        words=words,
        extra_words=extra_words,
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
