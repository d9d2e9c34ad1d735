"""Bundles, as commands read and describe them: their manifest, and the part of it that they hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from aotgaudi.bundle.bundle import Bundle, open_bundle
from aotgaudi.bundle.format import INDEX_NAME
from aotgaudi.bundle.part import describe_part, proved_part
from aotgaudi.bundle.receipt import ClosedUnder
from aotgaudi.manifest.manifest import Manifest, load_manifest_or_spec
from aotgaudi.manifest.subset import Subset, largest_subset

if TYPE_CHECKING:
    from aotgaudi.compile.plan import Plan


def load_manifest_of(path: Path) -> Manifest:
    """Returns the manifest of a bundle of programs, or the manifest in a file, or that of a spec.

    Raises like `open_bundle` and `load_manifest_or_spec`.
    """
    if (path / INDEX_NAME).is_file():
        bundle = open_bundle(path)
        bundle.require_programs()
        return bundle.manifest
    return load_manifest_or_spec(path)


def part_document(bundle: Bundle) -> dict[str, Any] | None:
    """Returns the part that a bundle holds as a JSON value; None for the whole. Raises like `proved_part`."""
    whole = proved_part(bundle, "whole")
    return None if whole is None else _document(whole, proved_part(bundle, "cut"))


def built_part(manifest: Manifest, plan: Plan) -> dict[str, Any]:
    """Returns the part of `manifest` that could be sealed from a plan's complete programs. `text` says if there is none."""
    warm = [entry for state, _ in plan.complete for entry in state.entries]
    whole = largest_subset(manifest, warm, "whole")
    if whole is None:
        return {"num_entries": len(warm), "text": f"{len(warm)} entries, which can serve nothing yet"}
    return _document(whole, largest_subset(manifest, warm, "cut"))


def _document(whole: Subset, cut: Subset | None) -> dict[str, Any]:
    cut = cut or whole
    under = "" if cut.limits == whole.limits else f"; with --outside chunk under {ClosedUnder.of(cut.limits)}"
    return {
        "num_entries": len(whole.manifest.entries),
        "limits": ClosedUnder.of(whole.limits).model_dump(),
        "chunked": ClosedUnder.of(cut.limits).model_dump(),
        "settings": list(whole.settings),
        "serves_all": whole.has_whole_limits,
        "text": describe_part(whole) + under,
    }
