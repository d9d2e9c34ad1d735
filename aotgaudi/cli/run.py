"""``aotgaudi run``: a server that is not ours, from its sealed caches, watched as long as it runs."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aotgaudi.cli.options.acceptance import acceptance_options
from aotgaudi.cli.options.command_words import CommandThatAsks, asked_ahead
from aotgaudi.cli.options.exposure import log_format_option
from aotgaudi.cli.options.supervision import Supervision, supervision_options
from aotgaudi.server.exposure import LogFormat
from aotgaudi.server.log import log_handler
from aotgaudi.wrap.run_options import Policy

if TYPE_CHECKING:
    from aotgaudi.bundle.trust import TrustPolicy

_BEGAN = time.monotonic()


@click.command(cls=CommandThatAsks, short_help="Run a server from its sealed caches.")
@click.option(
    "--bundle",
    type=click.Path(path_type=Path),
    required=True,
    metavar="DIR",
    help="What `build capture` sealed.",
)
@click.option(
    "--require-warm", is_flag=True, help="Serve warm or not at all: end the server unless it is proved warm."
)
@supervision_options
@log_format_option
@acceptance_options
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND")
def run(
    *,
    bundle: Path,
    require_warm: bool,
    supervision: Supervision,
    log_format: LogFormat,
    acceptance: TrustPolicy,
    words: tuple[str, ...],
) -> None:
    """Run COMMAND, a server such as `vllm serve MODEL ...`, from the caches that BUNDLE holds.

    The bundle is verified, this launch is compared with the sealed one, and the files are restored into a private place
    while they are hashed. The server is started there and watched from inside and outside. GET /ready says 200 when it
    serves, has answered the sealed exercise again, and nothing speaks against its being warm.

    Exit codes: the server's own (128 + n for signal n); before it is ready 2 usage, 3 not warm, 4 corrupt or untrusted,
    5 another machine or other software.
    """
    supervise(bundle, require_warm, supervision, acceptance, words=words, log_format=log_format)


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
    """Runs a guest and exits with what it ended with; `serve` does the same, with the sealed command."""
    from aotgaudi.wrap.readiness import RunOptions  # While the interpreter is being asked.
    from aotgaudi.wrap.run import run as run_guest

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
        exercises=supervision.exercises,
        repairs=supervision.repairs,
        root=supervision.root,
        listen=supervision.listen,
        began=_BEGAN,
        asking=asked_ahead(),
    )
    raise click.exceptions.Exit(run_guest(options))
