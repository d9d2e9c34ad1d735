"""Every command by name, in groups that import a command only when it is invoked: ``--help`` and completion import none."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
from click.shell_completion import CompletionItem


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """Where to find a command (``module:attribute``, of this package) and the line that ``--help`` prints for it."""

    target: str
    help: str

    def load(self) -> click.Command:
        """Imports the module and returns its command."""
        module, _, attribute = self.target.partition(":")
        command = getattr(importlib.import_module(f"aotgaudi.cli.{module}"), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{self.target} is not a click command")
        return command


class LazyGroup(click.Group):
    """A group over a table of lazy commands."""

    def __init__(self, *args: Any, lazy: Mapping[str, LazyCommand], **extra: Any) -> None:
        """Takes the table, and the arguments of ``click.Group``."""
        super().__init__(*args, **extra)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names in the order of the table, which is the order in which a user meets them."""
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports and returns a command; None if no command has that name."""
        found = self.lazy.get(cmd_name)
        return found.load() if found else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command. For an unknown name it suggests the nearest one, without importing any."""
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
        """Returns the completions for the shell: commands, from the table alone, and our options."""
        names = [
            CompletionItem(name, help=command.help)
            for name, command in self.lazy.items()
            if name.startswith(incomplete)
        ]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]


class BuildGroup(LazyGroup):
    """``build SPEC`` is ``build all SPEC``: if the first word names no command, it is an argument of ``all``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Puts ``all`` first if no command is named."""
        known = {*self.lazy, *ctx.help_option_names}
        if args and args[0] not in known and not self._is_misspelt(args[0]):
            args = ["all", *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Returns commands, options and files: ``all`` takes a spec."""
        files = [] if incomplete.startswith("-") else [CompletionItem(incomplete, type="file")]
        return [*super().shell_complete(ctx, incomplete), *files]

    def _is_misspelt(self, name: str) -> bool:
        """Whether `name` is probably a misspelt command: a bare word similar to one, and not a file."""
        is_word = name.replace("-", "").isalpha()
        return is_word and bool(difflib.get_close_matches(name, self.lazy)) and not Path(name).exists()


def _table(**rows: tuple[str, str]) -> Mapping[str, LazyCommand]:
    return MappingProxyType({name: LazyCommand(*row) for name, row in rows.items()})


COMMANDS = _table(
    build=("verbs:build", "Enumerate, compile and seal what a spec needs."),
    serve=("serve:serve", "Serve a model from a bundle."),
    run=("run:run", "Run a server that is not ours from its sealed caches."),
    model=("model:model", "Make a model directory that `serve` reads."),
    diff=("diff:diff", "Show what differs between manifests, and why."),
    explain=("explain:explain", "Say why entries are not warm: what changed."),
    coverage=("coverage:coverage", "Prove that every step that can be formed has an entry."),
    report=("report:report", "Show a spec, a manifest or a bundle on one page."),
    tune=("tune:tune", "Choose buckets from a trace of requests."),
    cache=("verbs:cache", "Inspect, shrink and check the store."),
    push=("images:push", "Push a bundle to a registry, as an OCI image."),
    pull=("images:pull", "Pull a bundle from a registry, and verify it."),
    verify=("verify:verify", "Check a bundle: complete, intact, signed."),
    sign=("sign:sign", "Sign a bundle."),
    key=("sign:key", "Make keys that sign bundles."),
    doctor=("doctor:doctor", "Say what this machine can build and serve."),
)

BUILD_COMMANDS = _table(
    all=("build:build_all", "Everything below (the default)."),
    manifest=("build_manifest:build_manifest", "Enumerate a spec's entries."),
    plan=("build:build_plan", "Show what would be compiled, and why."),
    cache=("build:build_cache", "Compile what is missing into the store."),
    bundle=("build:build_bundle", "Seal a manifest's artifacts."),
    capture=("build_capture:capture", "Run another server, and seal what it compiled, proved."),
    image=("images:build_image", "Put a bundle into an OCI image."),
)

CACHE_COMMANDS = _table(
    stats=("cache:stats", "Count what the store holds."),
    gc=("cache:gc", "Shrink the store to a size."),
    fsck=("cache:fsck", "Verify every object and record."),
    root=("cache:root", "Choose what is never removed."),
)


@click.group(cls=BuildGroup, lazy=BUILD_COMMANDS)
def build() -> None:
    """Enumerate, compile and seal what a spec needs; `build SPEC` does all of it."""


@click.group(cls=LazyGroup, lazy=CACHE_COMMANDS)
def cache() -> None:
    """Inspect, shrink and check the store, and choose what it keeps."""
