"""``aotgaudi push`` and ``aotgaudi pull``: bundles as OCI images, which skopeo copies."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import click

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.trust import TrustPolicy
from aotgaudi.cli.options import json_option, path_option
from aotgaudi.cli.progress import interrupted_by_sigterm
from aotgaudi.cli.serving_options import acceptance_options
from aotgaudi.cli.show import emit, size_text
from aotgaudi.share.image import copy_image, layout_name, pull_image, write_image

insecure_option = click.option(
    "--insecure",
    "is_insecure",
    is_flag=True,
    help="Use plain http and unverified TLS with the registry (skopeo's --tls-verify=false).",
)


@click.command("push")
@click.argument("source", metavar="BUNDLE")
@click.argument("destination", metavar="DEST")
@insecure_option
@json_option("Print what was pushed as JSON.")
def push(*, source: str, destination: str, is_insecure: bool, as_json: bool) -> None:
    """Push BUNDLE to DEST as an OCI image.

    BUNDLE is a directory, or an image layout (oci:DIR[:TAG]) that `build image` wrote. DEST is any name that skopeo writes
    an image to, such as docker://HOST/NAME:TAG. Credentials are skopeo's (skopeo login).
    """
    with interrupted_by_sigterm(), contextlib.ExitStack() as ends:
        if not source.startswith("oci:"):
            bundle = open_bundle(source)
            root = Path(ends.enter_context(tempfile.TemporaryDirectory()), "image")
            source = layout_name(root)
            write_image(bundle, root, tag="latest")
        pushed = push_image(source, destination, is_insecure=is_insecure)
    emit({"pushed": pushed}, as_json, f"pushed: {pushed}")


def push_image(source: str, destination: str, *, is_insecure: bool) -> str:
    """Copies an image, and returns a reference to exactly this image (for a registry: HOST/NAME@sha256:...)."""
    digest = copy_image(source, destination, is_insecure=is_insecure)
    if not destination.startswith("docker://"):
        return f"{destination} {digest}"
    head, separator, name = destination.removeprefix("docker://").rpartition("/")
    return f"{head}{separator}{name.partition('@')[0].partition(':')[0]}@{digest}"


@click.command("pull")
@click.argument("source", metavar="SOURCE")
@path_option("-o", "--output", required=True, metavar="DIR", help="Where the bundle goes.")
@insecure_option
@acceptance_options
@json_option("Print what was pulled as JSON.")
def pull(*, source: str, output: Path, is_insecure: bool, acceptance: TrustPolicy, as_json: bool) -> None:
    """Pull the bundle of an OCI image into DIR, and verify it.

    SOURCE is any name that skopeo reads an image from, such as docker://HOST/NAME:TAG or oci:DIR[:TAG]. Credentials are
    skopeo's (skopeo login). A bundle that is already in DIR is replaced once the new one is verified.
    """
    with interrupted_by_sigterm():
        bundle = pull_image(source, output, acceptance, is_insecure=is_insecure)
    counts = bundle.index.counts
    document = {
        "bundle": str(bundle.path),
        "manifest_id": bundle.index.manifest_id,
        "num_objects": counts.objects,
        "size_bytes": counts.object_bytes,
    }
    size = size_text(counts.object_bytes)
    emit(document, as_json, f"pulled: {bundle.path} ({counts.objects} objects, {size}, all verified)")
