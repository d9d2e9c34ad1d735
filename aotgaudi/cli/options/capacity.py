"""Options of `serve` about how much it takes on, and when it counts as stuck."""

from __future__ import annotations

import functools
from typing import Any

import click

from aotgaudi.cli.options.common import Command, FiniteRange
from aotgaudi.engine.room import RoomLimits

_DEFAULTS = RoomLimits()


def capacity_options(function: Command) -> Command:
    """``--max-requests`` and ``--max-prompt-tokens`` as one argument `room`, and ``--stall-seconds``."""

    @functools.wraps(function)
    def command(*, max_requests: int, max_prompt_tokens: int, **others: Any) -> Any:
        room = RoomLimits(max_requests=max_requests, max_prompt_tokens=max_prompt_tokens)
        return function(room=room, **others)

    requests_option = click.option(
        "--max-requests",
        type=click.IntRange(min=1),
        default=_DEFAULTS.max_requests,
        show_default=True,
        metavar="N",
        help="How many requests may wait or run; more get 429.",
    )
    tokens_option = click.option(
        "--max-prompt-tokens",
        type=click.IntRange(min=1),
        default=_DEFAULTS.max_prompt_tokens,
        show_default=True,
        metavar="N",
        help="How many tokens the prompts of all these may have; more get 429.",
    )
    stall_option = click.option(
        "--stall-seconds",
        type=FiniteRange(min=0, min_open=True),
        metavar="SECONDS",
        help="When /health says 503: requests wait, and no step has ended for so long.  "
        "[default: 60 with --require-warm, else never]",
    )
    return requests_option(tokens_option(stall_option(command)))
