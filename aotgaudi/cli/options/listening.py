"""Options of a server that listens: where, under which names, and what clients are held to."""

from __future__ import annotations

import functools
from typing import Any

import click

from aotgaudi.cli.options.common import Command, FiniteRange, with_options
from aotgaudi.server.front.limits import DEFAULT_LIMITS, Listening


def listening_options(function: Command) -> Command:
    """``--host``, ``--port`` and what clients are held to; the command gets them as one argument `listening`."""

    @functools.wraps(function)
    def command(
        *,
        host: str,
        port: int,
        allowed_hosts: tuple[str, ...],
        max_connections: int | None,
        client_seconds: float,
        **others: Any,
    ) -> Any:
        listening = Listening(
            host=host,
            port=port,
            allowed_hosts=allowed_hosts,
            max_connections=max_connections,
            client_seconds=client_seconds,
        )
        return function(listening=listening, **others)

    return with_options(command, _OPTIONS)


_OPTIONS = (
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
    click.option(
        "--port",
        type=click.IntRange(0, 65535),
        default=8000,
        show_default=True,
        help="Port (0: any free one).",
    ),
    click.option(
        "--allowed-host",
        "allowed_hosts",
        multiple=True,
        metavar="NAME",
        help="Name that requests may use (repeatable; *.example.com; *)  [default: the address's own; any on 0.0.0.0]",
    ),
    click.option(
        "--max-connections",
        type=click.IntRange(min=1),
        metavar="N",
        help=f"Connections at once  [default: {DEFAULT_LIMITS.max_connections}, or as many as files may be open]",
    ),
    click.option(
        "--client-timeout",
        "client_seconds",
        type=FiniteRange(min=0, min_open=True),
        default=DEFAULT_LIMITS.client_seconds,
        show_default=True,
        metavar="SECONDS",
        help="How long a client may keep the server waiting: for a request, or by not reading its answer.",
    ),
)
