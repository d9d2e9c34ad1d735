"""Options about what a server shows of itself: its log and its dashboard."""

from __future__ import annotations

import functools
from typing import Any, get_args

import click

from aotgaudi.cli.options.common import Command, with_options
from aotgaudi.server.exposure import Exposure, LogFormat


def exposure_options(function: Command) -> Command:
    """``--log-format``, ``--access-log`` and ``--dashboard``; the command gets them as one argument `exposure`."""

    @functools.wraps(function)
    def command(*, log_format: LogFormat, access_log: bool, dashboard: bool, **others: Any) -> Any:
        exposure = Exposure(log_format=log_format, access_log=access_log, dashboard=dashboard)
        return function(exposure=exposure, **others)

    return with_options(command, _OPTIONS)


log_format_option = click.option(
    "--log-format",
    type=click.Choice(get_args(LogFormat)),
    default="text",
    show_default=True,
    help="Lines of the log: text, or one JSON object each.",
)

_OPTIONS = (
    log_format_option,
    click.option(
        "--access-log", is_flag=True, help="Log a line for each request, with its tokens and seconds."
    ),
    click.option("--dashboard", is_flag=True, help="Show the running server on a page, at /dashboard."),
)
