"""``aotgaudi build SPEC``: manifest, then what is missing, then the bundle."""

from __future__ import annotations

from pathlib import Path

import click

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.signing import Signing
from aotgaudi.bundle.staging import refuse_foreign
from aotgaudi.cli.commands.build_bundle import describe_bundle
from aotgaudi.cli.commands.build_cache import compile_missing, describe
from aotgaudi.cli.options.common import load_manifest_or_spec
from aotgaudi.cli.options.signing import signing_options
from aotgaudi.cli.options.spec_source import default_manifest_path
from aotgaudi.cli.options.store import StorePlace, store_options
from aotgaudi.cli.options.worker import WorkerPlace, worker_options
from aotgaudi.manifest.codec import dumps, write_manifest
from aotgaudi.pipeline import seal


@click.command("all")
@click.argument("spec_path", metavar="SPEC", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The bundle  [default: SPEC's name with .bundle]",
)
@signing_options
@store_options
@worker_options
def build_all(
    spec_path: Path, output: Path | None, signing: Signing | None, place: StorePlace, workers: WorkerPlace
) -> None:
    """Enumerate SPEC (or take a manifest), compile what is missing, and seal a bundle. Does nothing twice."""
    manifest = load_manifest_or_spec(spec_path)
    bundle = output or default_bundle_path(spec_path)
    refuse_foreign(bundle)
    store = place.open()
    path = default_manifest_path(spec_path) if spec_path.suffix == ".toml" else spec_path
    if path != spec_path and not (path.is_file() and path.read_bytes() == dumps(manifest)):
        write_manifest(path, manifest)
    click.echo(f"manifest: {path}: {len(manifest.entries)} entries, id {manifest.id[:16]}")
    with store.in_use():
        click.echo(describe(compile_missing(manifest, store, workers, manifest.entries)))
        seal(manifest, store, bundle, signing=signing)
    click.echo(describe_bundle(open_bundle(bundle), len(manifest.entries)))


def default_bundle_path(spec_path: Path) -> Path:
    """Returns where the bundle of a spec or a manifest goes: in the current folder, ``x.toml`` -> ``x.bundle``."""
    name = spec_path.name.removesuffix(".toml").removesuffix(".json").removesuffix(".manifest")
    return Path(f"{name}.bundle")
