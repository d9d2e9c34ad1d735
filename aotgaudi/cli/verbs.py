"""Every command, by dotted name, and groups that import a command only when it is invoked: ``--help`` costs nothing."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import click
from click.shell_completion import CompletionItem


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """Where to find a command (``module:attribute``), and the line that ``--help`` prints for it."""

    target: str
    help: str

    def load(self) -> click.Command:
        """Imports the module and returns its command."""
        module, _, attribute = self.target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{self.target} is not a click command")
        return command


class LazyGroup(click.Group):
    """A group over a table of lazy commands."""

    def __init__(self, *args: Any, lazy: Mapping[str, LazyCommand], **extra: Any) -> None:
        """Takes the table, and whatever ``click.Group`` takes."""
        super().__init__(*args, **extra)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names in the order of the table: the order in which a user meets them."""
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports and returns a command; None if no command has that name."""
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


COMMANDS: Mapping[str, LazyCommand] = MappingProxyType(
    {
        "build": LazyCommand(
            "aotgaudi.cli.commands.build:build", "Enumerate, compile and seal what a spec needs."
        ),
        "serve": LazyCommand("aotgaudi.cli.commands.serve:serve", "Serve a model from a bundle."),
        "run": LazyCommand(
            "aotgaudi.cli.commands.run:run", "Run a server that is not ours from its sealed caches."
        ),
        "model": LazyCommand(
            "aotgaudi.cli.commands.model:model", "Make a model directory that `serve` reads."
        ),
        "diff": LazyCommand(
            "aotgaudi.cli.commands.diff:diff", "Show what differs between manifests, and why."
        ),
        "explain": LazyCommand(
            "aotgaudi.cli.commands.explain:explain", "Say why entries are not warm: what changed."
        ),
        "coverage": LazyCommand(
            "aotgaudi.cli.commands.coverage:coverage",
            "Prove that every step that can be formed has an entry.",
        ),
        "report": LazyCommand(
            "aotgaudi.cli.commands.report:report", "Show a spec, a manifest or a bundle on one page."
        ),
        "tune": LazyCommand("aotgaudi.cli.commands.tune:tune", "Choose buckets from a trace of requests."),
        "cache": LazyCommand(
            "aotgaudi.cli.commands.cache:cache", "Inspect, shrink, check and share the store."
        ),
        "verify": LazyCommand(
            "aotgaudi.cli.commands.verify:verify", "Check a bundle: complete, intact, signed."
        ),
        "sign": LazyCommand("aotgaudi.cli.commands.sign:sign", "Sign a bundle."),
        "key": LazyCommand("aotgaudi.cli.commands.sign:key", "Make keys that sign bundles."),
        "doctor": LazyCommand(
            "aotgaudi.cli.commands.doctor:doctor", "Say what this machine can build and serve."
        ),
        "bench": LazyCommand("aotgaudi.cli.commands.bench:bench", "Measure on this machine."),
    }
)

BUILD_COMMANDS: Mapping[str, LazyCommand] = MappingProxyType(
    {
        "all": LazyCommand("aotgaudi.cli.commands.build_all:build_all", "Everything below (the default)."),
        "manifest": LazyCommand(
            "aotgaudi.cli.commands.build_manifest:build_manifest", "Enumerate a spec's entries."
        ),
        "plan": LazyCommand(
            "aotgaudi.cli.commands.build_plan:build_plan", "Show what would be compiled, and why."
        ),
        "cache": LazyCommand(
            "aotgaudi.cli.commands.build_cache:build_cache", "Compile what is missing into the store."
        ),
        "bundle": LazyCommand(
            "aotgaudi.cli.commands.build_bundle:build_bundle", "Seal a manifest's artifacts."
        ),
        "capture": LazyCommand(
            "aotgaudi.cli.commands.build_capture:capture",
            "Run another server, and seal what it compiled, proved.",
        ),
        "image": LazyCommand(
            "aotgaudi.cli.commands.build_image:build_image", "Put a bundle into an OCI image."
        ),
    }
)

CACHE_COMMANDS: Mapping[str, LazyCommand] = MappingProxyType(
    {
        "stats": LazyCommand("aotgaudi.cli.commands.cache:stats", "Count what the store holds."),
        "gc": LazyCommand("aotgaudi.cli.commands.cache:gc", "Shrink the store to a size."),
        "fsck": LazyCommand("aotgaudi.cli.commands.cache_fsck:fsck", "Verify every object and record."),
        "root": LazyCommand("aotgaudi.cli.commands.cache_root:root", "Choose what is never removed."),
        "push": LazyCommand(
            "aotgaudi.cli.commands.cache_push:push", "Share a bundle, or what a manifest needs."
        ),
        "pull": LazyCommand(
            "aotgaudi.cli.commands.cache_pull:pull", "Fetch a bundle, or what a manifest needs."
        ),
    }
)

BENCH_COMMANDS: Mapping[str, LazyCommand] = MappingProxyType(
    {
        "startup": LazyCommand(
            "aotgaudi.cli.commands.bench_startup:bench_startup",
            "Where the seconds of a start go, beside the floor.",
        ),
    }
)
