"""The command of a server, after ``--``, for verbs that have arguments of their own besides."""

from __future__ import annotations

import os
from typing import Any

import click

from aotgaudi.wrap.interpreter import Asking, begin

_ASKING = "aotgaudi.asking"


class CommandWithWords(click.Command):
    """Gives its callback ``words``: what stands after the first ``--``, untouched; () where there is none."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses what stands before ``--``."""
        at = args.index("--") if "--" in args else len(args)
        rest = super().parse_args(ctx, args[:at])
        ctx.params["words"] = tuple(args[at + 1 :])
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Returns the parts of the usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


class CommandThatAsks(click.Command):
    """Asks the interpreter of the server that its ``words`` start before anything else: `asked_ahead`."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        asking = begin(ctx.params["words"], os.environ)
        if asking is None:
            return super().invoke(ctx)
        ctx.meta[_ASKING] = asking
        with asking:
            return super().invoke(ctx)


def asked_ahead() -> Asking | None:
    """Returns the interpreter that the command under way has asked; None where it has not, or another one."""
    context = click.get_current_context(silent=True)
    found = None if context is None else context.meta.get(_ASKING)
    return found if isinstance(found, Asking) else None
