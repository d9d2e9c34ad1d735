"""``aotgaudi build image``: puts a bundle into an OCI image."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, cast

import click

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.cli.images import insecure_option, push_image
from aotgaudi.cli.options import json_option, path_argument, path_option
from aotgaudi.cli.progress import interrupted_by_sigterm
from aotgaudi.cli.show import emit, size_text
from aotgaudi.share.image import WrittenImage, layout_name, open_base, write_image
from aotgaudi.share.layer import Compression
from aotgaudi.share.oci import BUNDLE_ROOT, check_tag, refuse_foreign_layout


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
