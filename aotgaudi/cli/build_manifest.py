"""``aotgaudi build manifest``: enumerates a spec's entries into a manifest file, or checks one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from aotgaudi.bucketing.coverage import UncoveredSteps, uncovered
from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.errors import StaleManifestError
from aotgaudi.manifest.codec import dumps, read_manifest, write_manifest
from aotgaudi.manifest.difference import differences
from aotgaudi.manifest.entries import ENTRY_KINDS
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.parse import load_spec

_SHOWN_DIFFERENCES = 5


@click.command("manifest")
@click.argument("spec_path", metavar="SPEC", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The manifest file  [default: SPEC with .manifest.json for .toml]",
)
@click.option("--check", is_flag=True, help="Write nothing; fail when the manifest file is out of date.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def build_manifest(spec_path: Path, output: Path | None, check: bool, as_json: bool) -> None:
    """Enumerate everything that SPEC says must be warm. Compiles nothing, and needs no torch."""
    path = output or default_manifest_path(spec_path)
    manifest = Manifest.of(load_spec(spec_path))
    if check:
        _check(spec_path, path, output, manifest)
    else:
        write_manifest(path, manifest)
    holes = tuple(uncovered(manifest.spec.limits, BucketTable.from_entries(manifest.entries)))
    summary = summarize(path, manifest, holes)
    click.echo(json.dumps(summary, indent=2) if as_json else "\n".join(_lines(summary)))


def default_manifest_path(spec_path: Path) -> Path:
    """Returns where a spec's manifest lies: beside it, ``x.toml`` -> ``x.manifest.json``."""
    return spec_path.with_name(f"{spec_path.name.removesuffix('.toml')}.manifest.json")


def summarize(path: Path, manifest: Manifest, holes: Iterable[UncoveredSteps]) -> dict[str, Any]:
    """Returns the counts, largest shapes and uncovered steps of a manifest, as a JSON value."""
    by_kind = {kind: manifest.of_kind(kind) for kind in ENTRY_KINDS}
    return {
        "manifest": str(path),
        "id": manifest.id,
        "model": manifest.spec.model.name,
        "num_entries": {kind: len(entries) for kind, entries in by_kind.items()},
        "largest": {kind: str(max(entries)) for kind, entries in by_kind.items() if entries},
        "uncovered": [str(hole) for hole in holes],
    }


def _check(spec_path: Path, path: Path, output: Path | None, manifest: Manifest) -> None:
    """Raises StaleManifestError when the file at `path` is not, byte for byte, what would be written."""
    mend = f"aotgaudi build manifest {spec_path}" + (f" -o {output}" if output else "")
    if not path.exists():
        raise StaleManifestError(f"{path}: there is no manifest (run `{mend}`)")
    committed = read_manifest(path)
    found = differences(committed, manifest)
    if not found and path.read_bytes() != dumps(manifest):
        found = ("it is formatted otherwise",)
    if found:
        shown = "; ".join(found[:_SHOWN_DIFFERENCES])
        more = f"; and {len(found) - _SHOWN_DIFFERENCES} more" if len(found) > _SHOWN_DIFFERENCES else ""
        raise StaleManifestError(f"{path}: is out of date: {shown}{more} (run `{mend}`)")


def _lines(summary: dict[str, Any]) -> list[str]:
    holes = summary["uncovered"]
    return [
        f"{summary['manifest']}: {sum(summary['num_entries'].values())} entries for {summary['model']}",
        *(
            f"  {kind:<8}{count:>7}" + (f"   largest {summary['largest'][kind]}" if count else "")
            for kind, count in summary["num_entries"].items()
        ),
        "coverage: every step that the scheduler can form has an entry"
        if not holes
        else f"coverage: {len(holes)} kinds of steps have no entry, first: {holes[0]}",
        f"id: {summary['id']}",
    ]
