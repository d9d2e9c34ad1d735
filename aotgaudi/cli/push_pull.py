"""``aotgaudi cache push`` and ``cache pull``: share a bundle, or what a manifest needs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from aotgaudi.bundle.bundle import Bundle, open_bundle
from aotgaudi.bundle.format import INDEX_NAME
from aotgaudi.bundle.staging import refuse_foreign
from aotgaudi.bundle.trust import TrustPolicy
from aotgaudi.cli.options import json_option, option, options_of, path_argument, path_option
from aotgaudi.cli.progress import TransferDisplay, transfer_display
from aotgaudi.cli.serving_options import acceptance_options
from aotgaudi.cli.show import emit, size_text
from aotgaudi.cli.store_options import StorePlace, store_options
from aotgaudi.errors import RemoteError
from aotgaudi.manifest.manifest import load_manifest_or_spec
from aotgaudi.share.credentials import Credentials, Login
from aotgaudi.share.image import LayoutImage, RegistryImage, find_image, pull_image
from aotgaudi.share.locations import NamedRemote, is_layout, open_remote, registry_host
from aotgaudi.share.oci import parse_layout
from aotgaudi.share.push_pull import pull_bundle, push_bundle
from aotgaudi.share.registry import RegistryRemote
from aotgaudi.share.registry_client import Reference, RegistryClient
from aotgaudi.share.remote import Remote, check_name
from aotgaudi.share.transfer import Sources

DEFAULT_NAME = "latest"


@dataclass(frozen=True)
class RegistryAccess:
    """How registries are accessed: whether by plain http, and which token services may see passwords."""

    allow_http: bool = option(
        "Use plain http even with registries that are not on this machine.", "--insecure", default=False
    )
    token_hosts: tuple[str, ...] = option(
        "Send a registry's password to HOST too, if the registry's tokens come from there (repeatable).",
        "--token-host",
        default=(),
        envvar="AOTGAUDI_TOKEN_HOST",
        metavar="HOST",
    )

    def client(self, reference: Reference) -> RegistryClient:
        """Returns a client for a repository. $ORAS_USER and $ORAS_PASS are for its registry."""
        credentials = read_credentials(reference.host, self.token_hosts)
        return RegistryClient(reference, credentials, allow_http=self.allow_http)

    def open(self, location: str, *others: str) -> tuple[NamedRemote, ...]:
        """Returns the remotes at the locations. Raises SpecError, RemoteError.

        $ORAS_USER and $ORAS_PASS are for the registry of the first location.
        """
        credentials = read_credentials(registry_host(location), self.token_hosts)
        return tuple(
            open_remote(text, credentials, allow_http=self.allow_http) for text in (location, *others)
        )


registry_options = options_of(RegistryAccess, "access")
"""``--insecure`` and ``--token-host``. The command gets `access`, a `RegistryAccess`."""

_name_option = click.option(
    "--name", metavar="NAME", help="The bundle's name there  [default: the reference's tag, or latest]"
)


def read_credentials(host: str | None, token_hosts: Iterable[str] = ()) -> Credentials:
    """Returns the sources of passwords: $ORAS_USER and $ORAS_PASS for `host` alone, and the files of docker and podman."""
    user, password = os.environ.get("ORAS_USER"), os.environ.get("ORAS_PASS")
    logins = (Login(host, user, password),) if host and user and password else ()
    return Credentials(logins, tuple(_config_files()), frozenset(token_hosts))


def _config_files() -> Iterator[Path]:
    if name := os.environ.get("REGISTRY_AUTH_FILE"):
        yield Path(name)
    if folder := os.environ.get("DOCKER_CONFIG"):
        yield Path(folder, "config.json")
    elif home := os.environ.get("HOME"):
        yield Path(home, ".docker", "config.json")
    if folder := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(folder, "containers", "auth.json")


@click.command("push")
@click.argument("location", metavar="REMOTE")
@path_argument("what", metavar="BUNDLE|MANIFEST")
@click.option("--force", "overwrite", is_flag=True, help="Upload even what is there: mends a damaged remote.")
@_name_option
@registry_options
@store_options
@json_option("Print what was pushed as JSON.")
def push(
    *,
    location: str,
    what: Path,
    name: str | None,
    access: RegistryAccess,
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
    if name is not None and not is_bundle:
        raise click.UsageError("--name names a bundle; what a manifest needs is found by its keys")
    with transfer_display("pushing") as display:
        if is_bundle:
            document = _push_bundle(what, target, name, display, overwrite=overwrite)
        else:
            document = _push_manifest(what, target.remote, place, display, overwrite=overwrite)
    emit(document, as_json, _push_line(document))


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


def _push_line(document: dict[str, Any]) -> str:
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


@click.command("pull")
@click.argument("location", metavar="REMOTE")
@path_argument("manifest_path", metavar="[MANIFEST]", required=False)
@path_option("-o", "--output", metavar="DIR", help="Pull a bundle into DIR.")
@click.option(
    "--remote", "others", multiple=True, metavar="REMOTE", help="Where to get what REMOTE lacks (repeatable)."
)
@_name_option
@registry_options
@acceptance_options
@store_options
@json_option("Print what was pulled as JSON.")
def pull(  # noqa: PLR0913 - one argument for each group of options
    *,
    location: str,
    manifest_path: Path | None,
    output: Path | None,
    others: tuple[str, ...],
    name: str | None,
    access: RegistryAccess,
    acceptance: TrustPolicy,
    place: StorePlace,
    as_json: bool,
) -> None:
    """Pull a bundle (-o DIR), or into the store what REMOTE has of a MANIFEST (or a spec).

    REMOTE is HOST/REPOSITORY[:TAG] of an OCI registry, a URL such as s3://BUCKET/PREFIX, a directory (./DIR, /DIR),
    or an image layout (oci:DIR[:TAG]). An image that holds a bundle is unpacked. Everything is verified as it arrives; an
    interrupted pull goes on where it stopped.
    """
    if (output is None) == (manifest_path is None):
        raise click.UsageError("say what to pull: a bundle (-o DIR), or what a MANIFEST needs")
    is_from_layout = is_layout(location) and output is not None and not others
    remotes = () if is_from_layout else access.open(location, *others)
    with transfer_display("pulling") as display:
        if output is None:
            assert manifest_path is not None
            document = _pull_manifest(remotes, manifest_path, place, display)
        elif is_from_layout:
            document = _bundle_document(_pull_layout(location, name, output, acceptance, display))
        else:
            document = _bundle_document(_pull_bundle(remotes, name, output, acceptance, display))
    emit(document, as_json, _pull_line(document))


def _pull_layout(
    location: str, tag: str | None, out: Path, acceptance: TrustPolicy, display: TransferDisplay
) -> Bundle:
    refuse_foreign(out)
    layout = parse_layout(location)
    return pull_image(LayoutImage(layout.root, tag or layout.tag), out, acceptance, display.expect)


def _pull_bundle(
    remotes: Sequence[NamedRemote],
    name: str | None,
    out: Path,
    acceptance: TrustPolicy,
    display: TransferDisplay,
) -> Bundle:
    refuse_foreign(out)
    name = check_name(name or _common_name(remotes))
    image, usable = _first_image(remotes, name, display)
    if image is not None:
        return pull_image(image, out, acceptance, display.expect)
    sources = Sources([remote.remote for remote in usable], display.conduct)
    return pull_bundle(sources, name, out, acceptance, display.expect)


def _first_image(
    remotes: Sequence[NamedRemote], name: str, display: TransferDisplay
) -> tuple[RegistryImage | None, Sequence[NamedRemote]]:
    """Returns the bundle's image `name` of the first remote that has one; if none has, None and the usable remotes."""
    usable = []
    for row in remotes:
        try:
            if isinstance(row.remote, RegistryRemote):
                image = find_image(row.remote, name, display.conduct)
                if image is not None:
                    return image, ()
            usable.append(row)
        except RemoteError as error:
            if len(remotes) == 1:
                raise
            display.conduct.warn(f"{error}; going on without this remote")
    return None, usable


def _common_name(remotes: Sequence[NamedRemote]) -> str:
    names = {remote.name for remote in remotes if remote.name is not None}
    if len(names) > 1:
        raise click.UsageError(
            f"the remotes have different tags ({', '.join(sorted(names))}): say --name NAME"
        )
    return names.pop() if names else DEFAULT_NAME


def _pull_manifest(
    remotes: Sequence[NamedRemote], path: Path, place: StorePlace, display: TransferDisplay
) -> dict[str, Any]:
    from aotgaudi.backends.offline import probe_target
    from aotgaudi.compile.share import pull_entries

    manifest = load_manifest_or_spec(path)
    store = place.open()
    store.require_writable()
    sources = Sources([row.remote for row in remotes], display.conduct)
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


def _bundle_document(bundle: Bundle) -> dict[str, Any]:
    counts = bundle.index.counts
    return {
        "bundle": str(bundle.path),
        "manifest_id": bundle.index.manifest_id,
        "num_objects": counts.objects,
        "size_bytes": counts.object_bytes,
    }


def _pull_line(document: dict[str, Any]) -> str:
    size = size_text(document["size_bytes"])
    if "bundle" in document:
        return f"pulled: {document['bundle']} ({document['num_objects']} objects, {size}, all verified)"
    wanted, found = document["num_wanted"], document["num_records"]
    if not wanted:
        return f"pulled: nothing, {document['store']} has all of it"
    return (
        f"pulled: {found} of {wanted} results that {document['store']} lacked"
        f" ({document['num_objects']} objects, {size})"
    )
