"""Writing a bundle as an OCI image: one layer, alone or on top of a base image.

Alone it is a data-only image: what Kubernetes mounts as an image volume, and what ``COPY --from`` takes. On a base image
the base's configuration stays (entry point, environment, user, history), and its layers are copied as they are.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aotgaudi.bundle.bundle import Bundle
from aotgaudi.bundle.capture_receipt import CaptureReceipt
from aotgaudi.digest import Digest, canonical_json, sha256_bytes
from aotgaudi.errors import ManifestError, SpecError, TargetError
from aotgaudi.share.layer import Compression, Layer, write_layer
from aotgaudi.share.layout import Image, Layout, LayoutWriter, new_layout
from aotgaudi.share.oci_documents import (
    BUNDLE_INDEX,
    BUNDLE_PATH,
    BUNDLE_ROOT,
    IMAGE_CONFIG_TYPE,
    IMAGE_MANIFEST_TYPE,
    KSERVE_PREFIX,
    LABEL_PREFIX,
    LAYER_TYPES,
    MANIFEST_ID,
    REF_NAME,
    descriptor,
    dump_manifest,
)

_EPOCH = "1970-01-01T00:00:00Z"
_CREATED_BY = "aotgaudi build image"
_ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64", "ppc64le": "ppc64le", "s390x": "s390x"}
)


@dataclass(frozen=True)
class Base:
    """An image to build on: where it lies, its manifest, and its configuration as JSON."""

    layout: Layout
    image: Image
    config: dict[str, Any]


@dataclass(frozen=True)
class WrittenImage:
    """What was written: the digests of the manifest and of the bundle's layer."""

    manifest: Digest
    layer: Layer


def read_base(root: Path, tag: str | None, bundle: Bundle) -> Base:
    """Reads the image to build on from a layout.

    Raises StoreError and ManifestError if it is not a layout or not an image, SpecError if there is no such tag or the
    base already holds a bundle, TargetError if its architecture is not the bundle's.
    """
    layout, architecture = Layout(root), architecture_of(bundle)
    image = layout.find(tag, architecture)
    config = _read_config(layout, image)
    if config.get("architecture") != architecture:
        raise TargetError(
            f"base image {root} is for {config.get('architecture')!r:.50}, the bundle for {architecture!r}"
        )
    if MANIFEST_ID in (config["config"].get("Labels") or {}):
        raise SpecError(str(root), "the base image holds a bundle already", "the image without one")
    return Base(layout, image, config)


def write_image(
    bundle: Bundle, out: Path, *, tag: str, compression: Compression = "zstd", base: Base | None = None
) -> WrittenImage:
    """Writes `bundle` as an image `tag` of a layout at `out`, which then holds nothing else.

    Raises CorruptError where the bundle, or the base, is damaged, and StoreError.
    """
    labels = bundle_labels(bundle)
    with new_layout(out) as writer:
        with writer.new_blob() as file:
            layer = write_layer(bundle, file, compression)
            writer.add(file, layer.blob)
        config = writer.add_bytes(canonical_json(_config(base, architecture_of(bundle), labels, layer)))
        layers = [*_copy_base(base, writer), _layer_row(layer, labels)]
        manifest = dump_manifest(descriptor(IMAGE_CONFIG_TYPE, config), layers, labels)
        digest = writer.add_bytes(manifest)
        platform = {"architecture": architecture_of(bundle), "os": "linux"}
        row = descriptor(IMAGE_MANIFEST_TYPE, digest, {**labels, REF_NAME: tag}, platform=platform)
        writer.commit(row)
    return WrittenImage(digest, layer)


def bundle_labels(bundle: Bundle) -> dict[str, str]:
    """Returns the labels of an image that holds `bundle`: what it answers, for what, and how much there is."""
    counts, target = bundle.index.counts, bundle.receipt.target
    return {
        MANIFEST_ID: bundle.index.manifest_id,
        BUNDLE_INDEX: f"sha256:{sha256_bytes(bundle.index_bytes)}",
        BUNDLE_PATH: f"/{BUNDLE_ROOT}",
        f"{LABEL_PREFIX}.target": " ".join((target.backend, target.machine, *target.isa)),
        **_told(torch=target.toolchain.get("torch", ""), isa=" ".join(target.isa)),
        **_contents(bundle),
        f"{LABEL_PREFIX}.objects": str(counts.objects),
        f"{LABEL_PREFIX}.object-bytes": str(counts.object_bytes),
    }


def _contents(bundle: Bundle) -> dict[str, str]:
    """What there is of programs or, of a capture, of files; and how others may place it."""
    counts = bundle.index.counts
    if isinstance(bundle.receipt, CaptureReceipt):
        return {f"{LABEL_PREFIX}.files": str(counts.units), **_kserve_labels(bundle)}
    return {
        f"{LABEL_PREFIX}.entries": str(len(bundle.receipt.programs)),
        f"{LABEL_PREFIX}.programs": str(counts.programs),
        f"{LABEL_PREFIX}.units": str(counts.units),
    }


def _kserve_labels(bundle: Bundle) -> dict[str, str]:
    """The labels by which KServe's Kernel Manager places an image of caches (redhat-et/GKM: mcv/pkg/cacheplan).

    The type is one of our own, for a bundle is no directory that a server could read: who knows only ``torch-compile`` must
    say so (UnsupportedCacheTypeError there), and not mount what no server finds. Subpath and variable say where the bundle
    belongs.
    """
    return {
        f"{KSERVE_PREFIX}/framework": bundle.launch.guest,
        f"{KSERVE_PREFIX}/cache-type": "aotgaudi",
        f"{KSERVE_PREFIX}/cache-hash": bundle.index.manifest_id,
        f"{KSERVE_PREFIX}/cache-mount-subpath": BUNDLE_ROOT,
        f"{KSERVE_PREFIX}/cache-root-env": f"AOTGAUDI_BUNDLE=/{BUNDLE_ROOT}",
    }


def _told(**values: str) -> dict[str, str]:
    return {f"{LABEL_PREFIX}.{name}": value for name, value in values.items() if value}


def architecture_of(bundle: Bundle) -> str:
    """Returns OCI's name of the machine that the bundle is for; amd64, Gaudi's hosts, where it is for none."""
    return _ARCHITECTURES.get(bundle.receipt.target.machine, "amd64")


def _read_config(layout: Layout, image: Image) -> dict[str, Any]:
    noun = f"image config {image.manifest.config.digest}"
    try:
        config = json.loads(layout.read(image.manifest.config.content))
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{noun} is not JSON: {error}") from error
    match config:
        case {"rootfs": {"type": "layers", "diff_ids": list(ids)}} if len(ids) == len(image.manifest.layers):
            config["config"] = config.get("config") or {}
        case _:
            raise ManifestError(
                f"{noun}: its rootfs does not list one diff_id for each layer of the manifest"
            )
    inner = config["config"]
    if not isinstance(inner, dict) or not isinstance(inner.get("Labels") or {}, dict):
        raise ManifestError(f"{noun}: its config, or the Labels in it, are no object")
    if not isinstance(config.get("history") or [], list):
        raise ManifestError(f"{noun}: its history is no list")
    return dict(config)


def _config(base: Base | None, architecture: str, labels: dict[str, str], layer: Layer) -> dict[str, Any]:
    """The configuration: the base's with labels, a layer and a line of history more."""
    if base is None:
        config: dict[str, Any] = {
            "architecture": architecture,
            "os": "linux",
            "created": _EPOCH,
            "config": {},
        }
        config["rootfs"] = {"type": "layers", "diff_ids": []}
    else:
        config = copy.deepcopy(base.config)
    config["config"]["Labels"] = {**(config["config"].get("Labels") or {}), **labels}
    config["rootfs"]["diff_ids"].append(layer.diff_id)
    step = {"created": _EPOCH, "created_by": _CREATED_BY, "comment": f"/{BUNDLE_ROOT}"}
    config["history"] = [*(config.get("history") or []), step]
    return config


def _copy_base(base: Base | None, writer: LayoutWriter) -> list[dict[str, Any]]:
    """Copies the base's layers; returns their descriptors."""
    if base is None:
        return []
    rows = base.image.manifest.layers
    for content in dict.fromkeys(row.content for row in rows):
        writer.add_from(base.layout, content)
    return [descriptor(row.media_type, row.content, row.annotations) for row in rows]


def _layer_row(layer: Layer, labels: dict[str, str]) -> dict[str, Any]:
    annotations = {name: labels[name] for name in (BUNDLE_INDEX, MANIFEST_ID)}
    return descriptor(LAYER_TYPES[layer.compression], layer.blob, annotations)
