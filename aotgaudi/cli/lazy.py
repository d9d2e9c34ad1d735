"""Command groups that import a command's module only when it is invoked, so that ``--help`` costs nothing."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click
from click.shell_completion import CompletionItem


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """Where a command is (``module:attribute``) and the line that ``--help`` prints for it."""

    target: str
    help: str

    def load(self) -> click.Command:
        """Imports the module and returns its command."""
        module, _, attribute = self.target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{self.target} is no click command")
        return command


class LazyGroup(click.Group):
    """A group over a table of lazy commands."""

    def __init__(self, *args: Any, lazy: Mapping[str, LazyCommand], **extra: Any) -> None:
        """Takes the table besides what ``click.Group`` takes."""
        super().__init__(*args, **extra)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names in the order of the table: the order in which one meets them."""
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports and returns a command; None when there is none of that name."""
        found = self.lazy.get(cmd_name)
        return found.load() if found else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command; for an unknown one names the nearest, and imports none to do so."""
        if args[0] not in self.lazy and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], self.lazy, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"There are: {', '.join(self.lazy)}."
            raise click.UsageError(f"No such command {args[0]!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the table's help lines."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in self.lazy.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Returns what the shell may complete: commands, from the table alone, and our options."""
        names = [
            CompletionItem(name, help=command.help)
            for name, command in self.lazy.items()
            if name.startswith(incomplete)
        ]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]
