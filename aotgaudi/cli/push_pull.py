"""``aotgaudi cache push`` and ``cache pull``: share what a manifest needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from aotgaudi.cli.options import json_option, path_argument
from aotgaudi.cli.progress import TransferDisplay, transfer_display
from aotgaudi.cli.show import emit, size_text
from aotgaudi.cli.store_options import StorePlace, store_options
from aotgaudi.manifest.manifest import load_manifest_or_spec
from aotgaudi.share.locations import open_remote
from aotgaudi.share.remote import Remote
from aotgaudi.share.transfer import Sources

_http_option = click.option("--insecure", "allow_http", is_flag=True, help="Allow plain http.")


@click.command("push")
@click.argument("location", metavar="REMOTE")
@path_argument("manifest_path", metavar="MANIFEST")
@click.option("--force", "overwrite", is_flag=True, help="Upload even what is there: mends a damaged remote.")
@_http_option
@store_options
@json_option("Print what was pushed as JSON.")
def push(
    *,
    location: str,
    manifest_path: Path,
    overwrite: bool,
    allow_http: bool,
    place: StorePlace,
    as_json: bool,
) -> None:
    """Push what the store has of a MANIFEST (or a spec) to REMOTE.

    REMOTE is a URL such as s3://BUCKET/PREFIX, or a directory (./DIR, /DIR). Only what is not there is uploaded.
    """
    remote = open_remote(location, allow_http=allow_http)
    with transfer_display("pushing") as display:
        document = _push_manifest(manifest_path, remote, place, display, overwrite=overwrite)
    emit(document, as_json, _push_line(document))


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


def _push_line(document: dict[str, Any]) -> str:
    line = (
        f"pushed: {document['num_records']} results to {document['reference']}"
        f" ({document['num_records_uploaded']} records and {document['num_uploaded']} objects uploaded,"
        f" {size_text(document['uploaded_bytes'])})"
    )
    if document["num_missing"]:
        line += f"; {document['num_missing']} are not in the store (aotgaudi build cache MANIFEST)"
    return line


@click.command("pull")
@click.argument("location", metavar="REMOTE")
@path_argument("manifest_path", metavar="MANIFEST")
@click.option(
    "--remote", "others", multiple=True, metavar="REMOTE", help="Where to get what REMOTE lacks (repeatable)."
)
@_http_option
@store_options
@json_option("Print what was pulled as JSON.")
def pull(
    *,
    location: str,
    manifest_path: Path,
    others: tuple[str, ...],
    allow_http: bool,
    place: StorePlace,
    as_json: bool,
) -> None:
    """Pull into the store what REMOTE has of a MANIFEST (or a spec).

    REMOTE is a URL such as s3://BUCKET/PREFIX, or a directory (./DIR, /DIR). Everything is verified as it arrives; an
    interrupted pull goes on where it stopped.
    """
    remotes = [open_remote(text, allow_http=allow_http) for text in (location, *others)]
    with transfer_display("pulling") as display:
        document = _pull_manifest(remotes, manifest_path, place, display)
    emit(document, as_json, _pull_line(document))


def _pull_manifest(
    remotes: list[Remote], path: Path, place: StorePlace, display: TransferDisplay
) -> dict[str, Any]:
    from aotgaudi.backends.offline import probe_target
    from aotgaudi.compile.share import pull_entries

    manifest = load_manifest_or_spec(path)
    store = place.open()
    store.require_writable()
    sources = Sources(remotes, display.conduct)
    target = probe_target(manifest.spec.target)
    with store.in_use():
        share = pull_entries(manifest.entries, manifest.spec, target, store, sources)
    return {
        "store": str(store.root),
        "num_wanted": share.num_wanted,
        "num_records": share.num_records,
        "num_objects": share.num_objects,
        "size_bytes": share.size_bytes,
    }


def _pull_line(document: dict[str, Any]) -> str:
    wanted, found = document["num_wanted"], document["num_records"]
    if not wanted:
        return f"pulled: nothing, {document['store']} has all of it"
    return (
        f"pulled: {found} of {wanted} results that {document['store']} lacked"
        f" ({document['num_objects']} objects, {size_text(document['size_bytes'])})"
    )
