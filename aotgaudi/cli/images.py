"""``aotgaudi push`` and ``aotgaudi pull``: bundles as OCI images, which skopeo copies."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any, cast

import click

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.trust import TrustPolicy
from aotgaudi.cli.options import acceptance_options, json_option, path_argument, path_option
from aotgaudi.cli.progress import interrupted_by_sigterm
from aotgaudi.cli.show import emit, size_text
from aotgaudi.share.image import WrittenImage, copy_image, layout_name, open_base, pull_image, write_image
from aotgaudi.share.layer import Compression
from aotgaudi.share.oci import BUNDLE_ROOT, check_tag, refuse_foreign_layout

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


@click.command("image")
@path_argument("bundle_path", metavar="BUNDLE")
@path_option("-o", "--output", required=True, metavar="DIR", help="The OCI image layout.")
@click.option(
    "--base",
    metavar="IMAGE",
    help="The base image: an OCI image layout (DIR[:TAG]), or docker://HOST/NAME:TAG, by skopeo.",
)
@click.option("--tag", default="latest", show_default=True, metavar="TAG", help="The image's tag in DIR.")
@click.option(
    "--compression",
    type=click.Choice(["zstd", "gzip"]),
    default="zstd",
    show_default=True,
    help="The layer's compression; gzip is for tools older than containerd 1.5 or Docker 23.",
)
@click.option(
    "--push", "push_to", metavar="DEST", help="Push the image there, by skopeo: docker://HOST/NAME:TAG."
)
@insecure_option
@json_option("Print what was written as JSON.")
def build_image(
    bundle_path: Path,
    output: Path,
    base: str | None,
    tag: str,
    compression: str,
    push_to: str | None,
    is_insecure: bool,
    as_json: bool,
) -> None:
    """Write BUNDLE as an image into DIR, an OCI image layout: one layer, alone or on a base image.

    The bundle is at /opt/aotgaudi/bundle. The same bundle, base and options give the same digests.
    """
    check_tag(tag)
    refuse_foreign_layout(output)
    bundle = open_bundle(bundle_path)
    with interrupted_by_sigterm(), contextlib.ExitStack() as ends:
        opened = None
        if base is not None:
            opened = ends.enter_context(open_base(base, bundle, is_insecure=is_insecure))
        written = write_image(
            bundle, output, tag=tag, compression=cast("Compression", compression), base=opened
        )
        document = _document(output, tag, written)
        if push_to is not None:
            source = f"{layout_name(output)}:{tag}"
            document["pushed"] = push_image(source, push_to, is_insecure=is_insecure)
    emit(document, as_json, _lines(document))


def _document(output: Path, tag: str, written: WrittenImage) -> dict[str, Any]:
    return {
        "layout": str(output),
        "tag": tag,
        "manifest": f"sha256:{written.manifest.sha256}",
        "layer": f"sha256:{written.layer.blob.sha256}",
        "layer_bytes": written.layer.blob.size_bytes,
        "diff_id": written.layer.diff_id,
        "path": f"/{BUNDLE_ROOT}",
    }


def _lines(document: dict[str, Any]) -> str:
    size = size_text(document["layer_bytes"])
    lines = [
        f"image: {document['layout']}:{document['tag']} {document['manifest']}"
        f" (layer of {size}, bundle at {document['path']})"
    ]
    return "\n".join([*lines, *([f"pushed: {document['pushed']}"] if "pushed" in document else [])])
