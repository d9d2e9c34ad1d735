"""The command of a server, after ``--``, for verbs that have arguments of their own besides."""

from __future__ import annotations

import click


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
