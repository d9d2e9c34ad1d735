"""``aotgaudi build image``: puts a bundle into an OCI image."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import click

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.cli.options import json_option, path_argument, path_option
from aotgaudi.cli.progress import transfer_display
from aotgaudi.cli.push_pull import RegistryAccess, registry_options
from aotgaudi.cli.show import emit, size_text
from aotgaudi.errors import SpecError
from aotgaudi.share.image import WrittenImage, push_image, read_base, write_image
from aotgaudi.share.layer import Compression
from aotgaudi.share.oci import BUNDLE_ROOT, Layout, parse_layout, refuse_foreign_layout
from aotgaudi.share.registry import RegistryRemote
from aotgaudi.share.registry_client import Reference, parse_reference
from aotgaudi.share.remote import check_name

_DEFAULT_TAG = "latest"


@click.command("image")
@path_argument("bundle_path", metavar="BUNDLE")
@path_option("-o", "--output", required=True, metavar="DIR", help="The OCI image layout.")
@click.option("--base", metavar="LAYOUT[:TAG]", help="The base image, from an OCI image layout.")
@click.option(
    "--tag", metavar="TAG", help=f"The image's tag  [default: the tag of --push, or {_DEFAULT_TAG}]"
)
@click.option(
    "--compression",
    type=click.Choice(["zstd", "gzip"]),
    default="zstd",
    show_default=True,
    help="The layer's compression; gzip is for tools older than containerd 1.5 or Docker 23.",
)
@click.option("--push", "push_to", metavar="HOST/REPO:TAG", help="Push the image there.")
@registry_options
@json_option("Print what was written as JSON.")
def build_image(
    bundle_path: Path,
    output: Path,
    base: str | None,
    tag: str | None,
    compression: str,
    push_to: str | None,
    access: RegistryAccess,
    as_json: bool,
) -> None:
    """Write BUNDLE as an image into DIR, an OCI image layout: one layer, alone or on a base image.

    The bundle is at /opt/aotgaudi/bundle. The same bundle, base and options give the same digests.
    """
    reference = None if push_to is None else _push_reference(push_to)
    tag = check_name(tag or (reference.tag if reference else None) or _DEFAULT_TAG)
    refuse_foreign_layout(output)
    bundle = open_bundle(bundle_path)
    place = None if base is None else parse_layout(base)
    written = write_image(
        bundle,
        output,
        tag=tag,
        compression=cast("Compression", compression),
        base=None if place is None else read_base(place.root, place.tag, bundle),
    )
    document = _document(output, tag, written)
    if reference is not None:
        with transfer_display("pushing") as display:
            document["pushed"], _ = push_image(
                Layout(output),
                written,
                RegistryRemote(access.client(reference)),
                reference.tag or tag,
                display.conduct,
            )
    emit(document, as_json, _lines(document))


def _push_reference(text: str) -> Reference:
    reference = parse_reference(text)
    if reference.digest is not None:
        raise SpecError("--push", "names a digest", "HOST/REPOSITORY:TAG")
    return reference


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
