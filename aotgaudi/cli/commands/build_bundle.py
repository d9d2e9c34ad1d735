"""``aotgaudi build bundle``: seals a manifest's artifacts into a directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from aotgaudi.bundle.bundle import Bundle, open_bundle
from aotgaudi.bundle.sealed import programs_of
from aotgaudi.bundle.signing import Signing
from aotgaudi.bundle.staging import refuse_foreign
from aotgaudi.cli.options.model import bound_model_option, find_model
from aotgaudi.cli.options.signing import signing_options
from aotgaudi.cli.options.store import StorePlace, store_options
from aotgaudi.cli.show.part import part_document
from aotgaudi.compile.pipeline import seal
from aotgaudi.manifest.codec import load_manifest_or_spec


@click.command("bundle")
@click.argument("manifest_path", metavar="MANIFEST", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, metavar="DIR", help="The bundle."
)
@click.option("--allow-missing", is_flag=True, help="Seal what is there; the rest compiles on first use.")
@click.option(
    "--part",
    is_flag=True,
    help="Seal what is there as a part, with the limits under which it is closed: what `build cache --budget` leaves.",
)
@bound_model_option
@signing_options
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print what was sealed as JSON.")
def build_bundle(
    manifest_path: Path,
    output: Path,
    allow_missing: bool,
    part: bool,
    model: str | None,
    signing: Signing | None,
    place: StorePlace,
    as_json: bool,
) -> None:
    """Seal what the store has for MANIFEST (or a spec) into DIR."""
    if part and allow_missing:
        raise click.UsageError(
            "--part and --allow-missing exclude each other: only a part can be served warm"
        )
    manifest = load_manifest_or_spec(manifest_path)
    refuse_foreign(output)
    directory = None if model is None else find_model(model)
    store = place.open()
    with store.in_use():
        seal(
            manifest,
            store,
            output,
            allow_missing=allow_missing,
            part=manifest.entries if part else None,
            signing=signing,
            model=directory,
        )
    document = bundle_document(open_bundle(output), len(manifest.entries))
    click.echo(json.dumps(document, indent=2) if as_json else "\n".join(bundle_lines(document)))


def bundle_document(bundle: Bundle, num_entries: int) -> dict[str, Any]:
    """Returns what was sealed as a JSON value. Calls are those of all distinct programs, each run once."""
    counts, receipt = bundle.index.counts, programs_of(bundle)
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
        "part": part_document(bundle),
    }


def bundle_lines(document: dict[str, Any]) -> list[str]:
    """Returns the same for people: a line, and one more for a part."""
    num_bound, part = document["num_model_files"], document["part"]
    num_entries = document["num_entries"] if part is None else part["num_entries"]
    return [
        f"bundle: {document['path']}: {num_entries} entries run on {document['num_units']} units "
        f"({document['num_programs']} programs, {document['num_calls']} calls, {document['object_bytes'] / 1e6:.1f} MB)"
        + (f", bound to {num_bound} files of its model" if num_bound else ""),
        *([] if part is None else [f"part: {part['text']}"]),
    ]
