"""``aotgaudi build bundle``: seals a manifest's artifacts into a directory."""

from __future__ import annotations

from pathlib import Path

import click

from aotgaudi.bundle.format import BundleIndex
from aotgaudi.bundle.pack import refuse_foreign
from aotgaudi.cli.options import load_manifest_or_spec, store_option
from aotgaudi.pipeline import seal
from aotgaudi.store.store import Store


@click.command("bundle")
@click.argument("manifest_path", metavar="MANIFEST", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, metavar="DIR", help="The bundle."
)
@click.option("--allow-missing", is_flag=True, help="Seal what there is; the rest compiles on first use.")
@store_option
def build_bundle(manifest_path: Path, output: Path, allow_missing: bool, store_root: Path) -> None:
    """Seal what the store has for MANIFEST (or a spec) into DIR."""
    manifest = load_manifest_or_spec(manifest_path)
    refuse_foreign(output)
    index = seal(manifest, Store.open(store_root), output, allow_missing=allow_missing)
    click.echo(describe_bundle(index, output, len(manifest.entries)))


def describe_bundle(index: BundleIndex, output: Path, num_entries: int) -> str:
    """One line for people."""
    counts = index.counts
    return (
        f"bundle: {output}: {num_entries} entries run on {counts.units} units "
        f"({counts.programs} programs, {counts.object_bytes / 1e6:.1f} MB)"
    )
