"""``aotgaudi cache push``: shares a bundle, or what the store has of a manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.format import INDEX_NAME
from aotgaudi.cli.commands.cache import size_text
from aotgaudi.cli.options.remote import RemoteAccess, remote_options
from aotgaudi.cli.options.store import StorePlace, store_options
from aotgaudi.cli.show.progress import TransferDisplay, transfer_display
from aotgaudi.manifest.codec import load_manifest_or_spec
from aotgaudi.share.locations import NamedRemote
from aotgaudi.share.push_pull import push_bundle
from aotgaudi.share.remote import Remote, check_name

DEFAULT_NAME = "latest"


@click.command("push")
@click.argument("location", metavar="REMOTE")
@click.argument("what", metavar="BUNDLE|MANIFEST", type=click.Path(path_type=Path))
@click.option("--force", "overwrite", is_flag=True, help="Upload even what is there: mends a damaged remote.")
@remote_options
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print what was pushed as JSON.")
def push(
    *,
    location: str,
    what: Path,
    access: RemoteAccess,
    overwrite: bool,
    place: StorePlace,
    as_json: bool,
) -> None:
    """Push a BUNDLE, or what the store has of a MANIFEST (or a spec), to REMOTE.

    REMOTE is HOST/REPOSITORY[:TAG] of an OCI registry, a URL such as s3://BUCKET/PREFIX, or a directory (./DIR, /DIR).
    Only what is not there is uploaded.
    """
    (target,) = access.open(location)
    is_bundle = (what / INDEX_NAME).exists()
    if access.name is not None and not is_bundle:
        raise click.UsageError("--name names a bundle; what a manifest needs is found by its keys")
    with transfer_display("pushing") as display:
        if is_bundle:
            document = _push_bundle(what, target, access.name, display, overwrite=overwrite)
        else:
            document = _push_manifest(what, target.remote, place, display, overwrite=overwrite)
    click.echo(json.dumps(document, indent=2) if as_json else _line(document))


def _push_bundle(
    path: Path, target: NamedRemote, name: str | None, display: TransferDisplay, *, overwrite: bool
) -> dict[str, Any]:
    name = check_name(name or target.name or DEFAULT_NAME)
    bundle = open_bundle(path)
    display.expect(bundle.index.counts.object_bytes)
    pushed = push_bundle(bundle, target.remote, name, display.conduct, overwrite=overwrite)
    return {
        "reference": pushed.reference,
        "name": name,
        "num_objects": pushed.num_objects,
        "num_uploaded": pushed.num_uploaded,
        "uploaded_bytes": pushed.uploaded_bytes,
    }


def _push_manifest(
    path: Path, remote: Remote, place: StorePlace, display: TransferDisplay, *, overwrite: bool
) -> dict[str, Any]:
    from aotgaudi.compile.pipeline import plan_manifest
    from aotgaudi.compile.share import push_plan

    manifest = load_manifest_or_spec(path)
    store = place.open(create=False)
    with store.in_use():
        plan = plan_manifest(manifest, store)
        share = push_plan(plan, store, remote, display.conduct, overwrite=overwrite)
    return {
        "reference": remote.label,
        "num_records": share.num_wanted,
        "num_records_uploaded": share.num_records,
        "num_uploaded": share.num_objects,
        "uploaded_bytes": share.size_bytes,
        "num_missing": len(plan.untraced) + len(plan.missing_units),
    }


def _line(document: dict[str, Any]) -> str:
    uploaded = f"{document['num_uploaded']} objects uploaded, {size_text(document['uploaded_bytes'])}"
    if "name" in document:
        return f"pushed: {document['reference']} ({document['num_objects']} objects, {uploaded})"
    line = (
        f"pushed: {document['num_records']} results to {document['reference']}"
        f" ({document['num_records_uploaded']} records and {uploaded})"
    )
    if document["num_missing"]:
        line += f"; {document['num_missing']} are not in the store (aotgaudi build cache MANIFEST)"
    return line
