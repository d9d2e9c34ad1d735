"""``aotgaudi build SPEC`` (manifest, missing artifacts, bundle in one run) and ``aotgaudi build bundle``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from aotgaudi.bundle.bundle import Bundle, open_bundle
from aotgaudi.bundle.pack import refuse_foreign
from aotgaudi.bundle.signing import Signing
from aotgaudi.cli.build_cache import (
    build_time_line,
    outcome_document,
    outcome_line,
    phase_rows,
    remote_lines,
)
from aotgaudi.cli.build_manifest import default_manifest_path
from aotgaudi.cli.build_options import remote_options, signing_options, worker_options
from aotgaudi.cli.cache import collect_after_build, collection_line
from aotgaudi.cli.options import json_option, path_argument, path_option
from aotgaudi.cli.progress import BuildDisplay, interrupted_by_sigterm
from aotgaudi.cli.serving_options import find_model
from aotgaudi.cli.show import emit
from aotgaudi.cli.store_options import StorePlace, store_limit_option, store_options
from aotgaudi.compile.pipeline import Workers, build, plan_manifest, seal
from aotgaudi.manifest.manifest import Manifest, dumps, load_manifest_or_spec, write_manifest
from aotgaudi.phases import Phases
from aotgaudi.share.remote_cache import Sharing

bound_model_option = click.option(
    "--model",
    metavar="DIR",
    help="Bind the bundle to this model directory (or hub id): what signs the bundle signs its files, too.",
)


@click.command("bundle")
@path_argument("manifest_path", metavar="MANIFEST")
@path_option("-o", "--output", required=True, metavar="DIR", help="The bundle.")
@bound_model_option
@signing_options
@store_options
@json_option("Print what was sealed as JSON.")
def build_bundle(
    manifest_path: Path,
    output: Path,
    model: str | None,
    signing: Signing | None,
    place: StorePlace,
    as_json: bool,
) -> None:
    """Seal what the store has for MANIFEST (or a spec) into DIR."""
    manifest = load_manifest_or_spec(manifest_path)
    refuse_foreign(output)
    directory = None if model is None else find_model(model)
    store = place.open()
    with store.in_use():
        seal(
            manifest,
            store,
            output,
            signing=signing,
            model=directory,
        )
    document = bundle_document(open_bundle(output), len(manifest.entries))
    emit(document, as_json, bundle_lines(document))


def bundle_document(bundle: Bundle, num_entries: int) -> dict[str, Any]:
    """Returns what was sealed as a JSON value. Calls are counted over all distinct programs, each run once."""
    counts, receipt = bundle.index.counts, bundle.require_programs()
    distinct = {digest: entry_id for entry_id, digest in receipt.programs.items()}
    return {
        "path": str(bundle.path),
        "manifest_id": bundle.index.manifest_id,
        "num_entries": num_entries,
        "num_entries_built": len(receipt.programs),
        "num_programs": counts.programs,
        "num_units": counts.units,
        "num_calls": sum(len(bundle.program(entry_id).calls) for entry_id in distinct.values()),
        "object_bytes": counts.object_bytes,
        "num_model_files": len(receipt.model or ()),
    }


def bundle_lines(document: dict[str, Any]) -> list[str]:
    """Returns the same for people."""
    num_bound = document["num_model_files"]
    return [
        f"bundle: {document['path']}: {document['num_entries']} entries run on {document['num_units']} units "
        f"({document['num_programs']} programs, {document['num_calls']} calls, {document['object_bytes'] / 1e6:.1f} MB)"
        + (f", bound to {num_bound} files of its model" if num_bound else ""),
    ]


@click.command("all")
@path_argument("spec_path", metavar="SPEC")
@path_option("-o", "--output", metavar="DIR", help="The bundle  [default: SPEC's name with .bundle]")
@bound_model_option
@signing_options
@store_options
@worker_options
@remote_options
@store_limit_option
@json_option("Print the outcome as JSON.")
def build_all(  # noqa: PLR0913 - one argument for each group of options
    *,
    spec_path: Path,
    output: Path | None,
    model: str | None,
    signing: Signing | None,
    place: StorePlace,
    workers: Workers,
    sharing: Sharing | None,
    store_limit: int | None,
    as_json: bool,
) -> None:
    """Enumerate SPEC (or take a manifest), compile what is missing, and seal a bundle. Does nothing twice."""
    click.get_current_context().with_resource(interrupted_by_sigterm())
    phases = Phases()
    with phases.time("enumerate"):
        manifest = load_manifest_or_spec(spec_path)
    bundle = output or default_bundle_path(spec_path)
    refuse_foreign(bundle)
    directory = None if model is None else find_model(model)
    store = place.open()
    manifest_path = _write_manifest(manifest, spec_path)
    if not as_json:
        click.echo(f"manifest: {manifest_path}: {len(manifest.entries)} entries, id {manifest.id[:16]}")
    result = build(
        manifest,
        bundle,
        store=store,
        remote=sharing,
        jobs=workers,
        sign_key=signing,
        model=directory,
        on_progress=BuildDisplay(),
        phases=phases,
    )
    outcome, sealed = result.outcome, open_bundle(bundle)
    document: dict[str, Any] = {
        "manifest": {"path": str(manifest_path), "id": manifest.id, "num_entries": len(manifest.entries)},
        "cache": outcome_document(outcome),
        "bundle": bundle_document(sealed, len(manifest.entries)),
        "phases": phase_rows(result.phases),
    }
    lines = [
        outcome_line(outcome),
        *remote_lines(outcome),
        *bundle_lines(document["bundle"]),
        build_time_line(result.phases, outcome),
    ]
    if store_limit is not None:
        document["gc"] = collect_after_build(store, store_limit, plan_manifest(manifest, store))
        lines.append(collection_line(document["gc"]))
    emit(document, as_json, lines)


def default_bundle_path(spec_path: Path) -> Path:
    """Returns the path for the bundle of a spec or a manifest: in the current folder, ``x.toml`` -> ``x.bundle``."""
    name = spec_path.name.removesuffix(".toml").removesuffix(".json").removesuffix(".manifest")
    return Path(f"{name}.bundle")


def _write_manifest(manifest: Manifest, spec_path: Path) -> Path:
    """Returns the manifest's path. Writes the manifest of a spec next to the spec unless it is up to date."""
    if spec_path.suffix != ".toml":
        return spec_path
    path = default_manifest_path(spec_path)
    if not (path.is_file() and path.read_bytes() == dumps(manifest)):
        write_manifest(path, manifest)
    return path
