"""Every command, by dotted name; none of them is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from aotgaudi.cli.lazy import LazyCommand

COMMANDS: Mapping[str, LazyCommand] = MappingProxyType(
    {
        "build": LazyCommand(
            "aotgaudi.cli.commands.build:build", "Enumerate, compile and seal what a spec needs."
        ),
        "serve": LazyCommand("aotgaudi.cli.commands.serve:serve", "Serve a model from a bundle."),
        "model": LazyCommand(
            "aotgaudi.cli.commands.model:model", "Make a model directory that `serve` reads."
        ),
        "diff": LazyCommand(
            "aotgaudi.cli.commands.diff:diff", "Show what differs between manifests, and why."
        ),
        "explain": LazyCommand(
            "aotgaudi.cli.commands.explain:explain", "Say why entries are not warm, by what changed."
        ),
        "coverage": LazyCommand(
            "aotgaudi.cli.commands.coverage:coverage",
            "Prove that every step that can be formed has an entry.",
        ),
        "cache": LazyCommand(
            "aotgaudi.cli.commands.cache:cache", "Look into the store, shrink it, check it, share it."
        ),
        "verify": LazyCommand(
            "aotgaudi.cli.commands.verify:verify", "Check a bundle: complete, intact, signed."
        ),
        "sign": LazyCommand("aotgaudi.cli.commands.sign:sign", "Sign a bundle."),
        "key": LazyCommand("aotgaudi.cli.commands.key:key", "Make keys that sign bundles."),
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
        "root": LazyCommand("aotgaudi.cli.commands.cache_root:root", "Say what is never removed."),
        "push": LazyCommand(
            "aotgaudi.cli.commands.cache_push:push", "Share a bundle, or what a manifest needs."
        ),
        "pull": LazyCommand(
            "aotgaudi.cli.commands.cache_pull:pull", "Fetch a bundle, or what a manifest needs."
        ),
    }
)
