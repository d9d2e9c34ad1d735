"""``aotgaudi build``: the offline half. ``aotgaudi build SPEC`` is ``aotgaudi build all SPEC``."""

from __future__ import annotations

import difflib
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from aotgaudi.cli.verbs import BUILD_COMMANDS, LazyGroup

_DEFAULT = "all"


class BuildGroup(LazyGroup):
    """A first word that names no command is an argument of the default command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Puts the default command first if none is named."""
        known = {*self.lazy, *ctx.help_option_names}
        if args and args[0] not in known and not self._is_misspelt(args[0]):
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Returns commands, options and files: the default command takes a spec."""
        files = [] if incomplete.startswith("-") else [CompletionItem(incomplete, type="file")]
        return [*super().shell_complete(ctx, incomplete), *files]

    def _is_misspelt(self, name: str) -> bool:
        """Whether `name` is meant as a command: a bare word close to one, and not a file."""
        is_word = name.replace("-", "").isalpha()
        return is_word and bool(difflib.get_close_matches(name, self.lazy)) and not Path(name).exists()


@click.group(cls=BuildGroup, lazy=BUILD_COMMANDS)
def build() -> None:
    """Enumerate, compile and seal what a spec needs; `build SPEC` does all of it."""
