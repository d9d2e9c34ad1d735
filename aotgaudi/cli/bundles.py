"""What commands take where they take a manifest."""

from __future__ import annotations

from pathlib import Path

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.format import INDEX_NAME
from aotgaudi.manifest.manifest import Manifest, load_manifest_or_spec


def load_manifest_of(path: Path) -> Manifest:
    """Returns the manifest of a bundle of programs, or the manifest in a file, or that of a spec.

    Raises like `open_bundle` and `load_manifest_or_spec`.
    """
    if (path / INDEX_NAME).is_file():
        bundle = open_bundle(path)
        bundle.require_programs()
        return bundle.manifest
    return load_manifest_or_spec(path)
