"""``aotgaudi diff``: what differs between two manifests or specs, and which value caused it; or between two captures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from aotgaudi.backends.base import Target
from aotgaudi.cli.commands.diff_captures import diff_captures
from aotgaudi.cli.commands.explain_launch import is_of_launch
from aotgaudi.cli.options.target import planned_target_option, refuse_other_target
from aotgaudi.manifest.codec import load_manifest_or_spec
from aotgaudi.manifest.difference import Cause, Difference, EntryChange, difference, examples
from aotgaudi.manifest.manifest import Manifest

_EXIT_DIFFERENT = 3


@click.command()
@click.argument("old", metavar="A", type=click.Path(path_type=Path))
@click.argument("new", metavar="B", type=click.Path(path_type=Path))
@click.option("--exit-code", is_flag=True, help="Exit with 3 when they differ.")
@planned_target_option
@click.option("--json", "as_json", is_flag=True, help="Print the difference as JSON.")
@click.pass_context
def diff(
    context: click.Context, old: Path, new: Path, exit_code: bool, described: Target | None, as_json: bool
) -> None:
    """Show what B has and A lacks, and the reverse: values of the spec, and entries.

    A and B are manifests or specs (.toml), or bundles of wrapped servers: then the components of their launches are
    compared, the conditions, and the files. Each changed value is tried alone on A's spec, so that it can be
    named as the cause of the entries that it adds or removes. Without --exit-code it exits with 0 even if they
    differ. No entry depends on --target: it is checked to be one for A and B, and changes nothing.
    """
    if is_of_launch(old) or is_of_launch(new):
        document, lines, is_different = diff_captures(old, new)
        click.echo(json.dumps(document, indent=2) if as_json else "\n".join(lines))
        context.exit(_EXIT_DIFFERENT if is_different and exit_code else 0)
    before, after = load_manifest_or_spec(old), load_manifest_or_spec(new)
    refuse_other_target(described, before.spec, after.spec)
    found = difference(before, after)
    if as_json:
        click.echo(
            json.dumps({"a": _side(old, before), "b": _side(new, after), **_document(found)}, indent=2)
        )
    else:
        click.echo("\n".join(_lines(found)) if found else "no difference")
    context.exit(_EXIT_DIFFERENT if found and exit_code else 0)


def _side(path: Path, manifest: Manifest) -> dict[str, Any]:
    return {"path": str(path), "id": manifest.id, "num_entries": len(manifest.entries)}


def _document(found: Difference) -> dict[str, Any]:
    return {
        "different": bool(found),
        "values": [{"where": c.where, "old": c.old, "new": c.new} for c in found.values],
        "entries": {kind: _kind_document(found.entries.of_kind(kind)) for kind in found.entries.counts()},
        "reordered": list(found.reordered),
        "causes": [_cause_document(cause) for cause in found.causes],
    }


def _kind_document(change: EntryChange) -> dict[str, Any]:
    return {
        "added": len(change.added),
        "removed": len(change.removed),
        "added_examples": examples(change.added),
        "removed_examples": examples(change.removed),
    }


def _cause_document(cause: Cause) -> dict[str, Any]:
    counts = cause.effect.counts()
    return {
        "where": cause.where,
        "entries": {kind: {"added": added, "removed": removed} for kind, (added, removed) in counts.items()},
        "problem": cause.problem,
    }


def _lines(found: Difference) -> Iterator[str]:
    sections = (
        ("spec", [str(change) for change in found.values]),
        ("entries", [f"{kind:<8} {found.entries.of_kind(kind)}" for kind in found.entries.counts()]),
        ("order", [f"{kind:<8} the same entries in another order" for kind in found.reordered]),
        ("caused by", [str(cause) for cause in found.causes]),
    )
    for title, lines in sections:
        if lines:
            yield f"{title}:"
            yield from (f"  {line}" for line in lines)
