"""``aotgaudi build bundle``: seals a manifest's artifacts into a directory."""

from __future__ import annotations

from pathlib import Path

import click

from aotgaudi.bundle.bundle import Bundle, open_bundle
from aotgaudi.bundle.signing import Signing
from aotgaudi.bundle.staging import refuse_foreign
from aotgaudi.cli.options.common import load_manifest_or_spec
from aotgaudi.cli.options.signing import signing_options
from aotgaudi.cli.options.store import StorePlace, store_options
from aotgaudi.pipeline import seal


@click.command("bundle")
@click.argument("manifest_path", metavar="MANIFEST", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, metavar="DIR", help="The bundle."
)
@click.option("--allow-missing", is_flag=True, help="Seal what there is; the rest compiles on first use.")
@signing_options
@store_options
def build_bundle(
    manifest_path: Path, output: Path, allow_missing: bool, signing: Signing | None, place: StorePlace
) -> None:
    """Seal what the store has for MANIFEST (or a spec) into DIR."""
    manifest = load_manifest_or_spec(manifest_path)
    refuse_foreign(output)
    store = place.open()
    with store.in_use():
        seal(manifest, store, output, allow_missing=allow_missing, signing=signing)
    click.echo(describe_bundle(open_bundle(output), len(manifest.entries)))


def describe_bundle(bundle: Bundle, num_entries: int) -> str:
    """One line for people. Calls are those of all distinct programs, each run once."""
    counts, programs = bundle.index.counts, bundle.receipt.programs
    distinct = {digest: entry_id for entry_id, digest in programs.items()}
    num_calls = sum(len(bundle.program(entry_id).calls) for entry_id in distinct.values())
    return (
        f"bundle: {bundle.path}: {num_entries} entries run on {counts.units} units "
        f"({counts.programs} programs, {num_calls} calls, {counts.object_bytes / 1e6:.1f} MB)"
    )
