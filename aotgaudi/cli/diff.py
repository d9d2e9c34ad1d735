"""``aotgaudi diff``: what differs between two manifests, and which value of the spec caused it; or between two captures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from aotgaudi.backends.base import Target
from aotgaudi.bundle.kind import is_capture
from aotgaudi.cli.captures import diff_captures
from aotgaudi.cli.manifests import load_manifest_of, planned_target_option, refuse_other_target
from aotgaudi.cli.options import json_option, path_argument
from aotgaudi.cli.show import emit
from aotgaudi.manifest.difference import Difference, EntryChange, difference, examples
from aotgaudi.manifest.manifest import Manifest

_EXIT_DIFFERENT = 3


@click.command()
@path_argument("old", metavar="A")
@path_argument("new", metavar="B")
@click.option("--exit-code", is_flag=True, help="Exit with 3 when they differ.")
@planned_target_option
@json_option("Print the difference as JSON.")
@click.pass_context
def diff(
    context: click.Context,
    old: Path,
    new: Path,
    exit_code: bool,
    described: Target | None,
    as_json: bool,
) -> None:
    """Show what B has and A lacks, and the reverse: values of the spec, and entries.

    A and B are manifests, specs (.toml) or bundles of programs. Of two bundles of wrapped servers the components of their
    launches are compared, the conditions, and the files. Each changed value is tried alone on A's spec, so that it can be
    named as the cause of the entries that it adds or removes. Without --exit-code it exits with 0 even if they
    differ. No entry depends on --target: it is checked to be one for A and B, and changes nothing.
    """
    if is_capture(old) or is_capture(new):
        document, lines, is_different = diff_captures(old, new)
        emit(document, as_json, lines)
        context.exit(_EXIT_DIFFERENT if is_different and exit_code else 0)
    before, after = load_manifest_of(old), load_manifest_of(new)
    refuse_other_target(described, before.spec, after.spec)
    found = difference(before, after)
    document = _document(found, (old, before), (new, after))
    emit(document, as_json, _lines(found) if found else "no difference")
    context.exit(_EXIT_DIFFERENT if found and exit_code else 0)


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


def _document(found: Difference, *sides: tuple[Path, Manifest]) -> dict[str, Any]:
    kinds = found.entries.counts()
    return {
        **{
            name: {"path": str(path), "id": manifest.id, "num_entries": len(manifest.entries)}
            for name, (path, manifest) in zip("ab", sides, strict=True)
        },
        "different": bool(found),
        "values": [{"where": one.where, "old": one.old, "new": one.new} for one in found.values],
        "entries": {kind: _change(found.entries.of_kind(kind)) for kind in kinds},
        "reordered": list(found.reordered),
        "causes": [
            {
                "where": cause.where,
                "entries": {
                    kind: {"added": added, "removed": removed}
                    for kind, (added, removed) in cause.effect.counts().items()
                },
                "problem": cause.problem,
            }
            for cause in found.causes
        ],
    }


def _change(change: EntryChange) -> dict[str, Any]:
    return {
        "added": len(change.added),
        "removed": len(change.removed),
        "added_examples": list(examples(change.added)),
        "removed_examples": list(examples(change.removed)),
    }
