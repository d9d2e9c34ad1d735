"""Writes and pushes a bundle as an OCI image, and extracts the bundle from an image in a registry or a layout.

Without a base, the image holds only data. Kubernetes can mount it as an image volume, and ``COPY --from`` can copy it. On a
base image, the bundle is one more layer. The base's configuration stays (entry point, environment, user, history), and its
layers are copied.

Before we receive a layer, we read its first files. The index must be the one that the image names, and the signature must be
that of a trusted key if one is required. They say how large the layer may be.
"""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Protocol, cast

from aotgaudi.bundle.bundle import Bundle, open_bundle
from aotgaudi.bundle.capture_receipt import CaptureReceipt
from aotgaudi.bundle.format import DOCUMENT_NAMES, INDEX_NAME, OBJECTS_NAME, load_index
from aotgaudi.bundle.staging import PARTIAL_NAME, publish, staging_directory
from aotgaudi.bundle.trust import ANY_BUNDLE, TrustPolicy
from aotgaudi.digest import Digest, canonical_json, sha256_bytes
from aotgaudi.errors import CorruptError, ManifestError, SpecError, TargetError, store_error
from aotgaudi.files import open_descriptor
from aotgaudi.share.layer import (
    MAX_ARCHIVE_BYTES,
    Compression,
    DirectorySink,
    Head,
    Layer,
    largest_archive_bytes,
    open_layer,
    read_head,
    unpack_bundle,
    write_layer,
)
from aotgaudi.share.oci import (
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
    Image,
    Layout,
    LayoutWriter,
    descriptor,
    dump_manifest,
    new_layout,
)
from aotgaudi.share.registry import BundleLayer, RegistryRemote, bundle_layer_of
from aotgaudi.share.transfer import Conduct, Partial, Sources, receive, require_room, send
from aotgaudi.store.cas import verified_chunks

_EPOCH = "1970-01-01T00:00:00Z"
_CREATED_BY = "aotgaudi build image"
_ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64", "ppc64le": "ppc64le", "s390x": "s390x"}
)


@dataclass(frozen=True)
class Base:
    """An image to build on: its layout, its manifest, and its configuration as JSON."""

    layout: Layout
    image: Image
    config: dict[str, Any]


@dataclass(frozen=True)
class WrittenImage:
    """The digests of a written image's manifest and of its layer with the bundle."""

    manifest: Digest
    layer: Layer


def read_base(root: Path, tag: str | None, bundle: Bundle) -> Base:
    """Reads the image to build on from a layout.

    Raises StoreError or ManifestError if it is not a layout or not an image, SpecError if there is no such tag or the base
    already holds a bundle, and TargetError if its architecture is not the bundle's.
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
    """Writes `bundle` as the image `tag` of a layout at `out`, which then holds nothing else.

    Raises CorruptError if the bundle or the base is damaged, and StoreError.
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
    """Returns the labels of an image that holds `bundle`: what it answers, for which target, and how much it holds."""
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
    """Returns labels with the numbers of programs or, for a capture, the number of files and KServe's labels."""
    counts = bundle.index.counts
    if isinstance(bundle.receipt, CaptureReceipt):
        return {f"{LABEL_PREFIX}.files": str(counts.units), **_kserve_labels(bundle)}
    return {
        f"{LABEL_PREFIX}.entries": str(len(bundle.receipt.programs)),
        f"{LABEL_PREFIX}.programs": str(counts.programs),
        f"{LABEL_PREFIX}.units": str(counts.units),
    }


def _kserve_labels(bundle: Bundle) -> dict[str, str]:
    """Returns the labels by which KServe's Kernel Manager places an image of caches (redhat-et/GKM: mcv/pkg/cacheplan).

    We use our own cache type, because no server can read a bundle as a directory. A manager that knows only
    ``torch-compile`` must report that (UnsupportedCacheTypeError there) instead of mounting files that no server finds.
    Subpath and variable say where the bundle belongs.
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
    """Returns OCI's name of the bundle's architecture. If the bundle has none, it is amd64, as on Gaudi's hosts."""
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
    """Returns the image's configuration: the base's, with added labels, a layer and a line of history."""
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
    """Copies the base's layers, and returns their descriptors."""
    if base is None:
        return []
    rows = base.image.manifest.layers
    for content in dict.fromkeys(row.content for row in rows):
        writer.add_from(base.layout, content)
    return [descriptor(row.media_type, row.content, row.annotations) for row in rows]


def _layer_row(layer: Layer, labels: dict[str, str]) -> dict[str, Any]:
    annotations = {name: labels[name] for name in (BUNDLE_INDEX, MANIFEST_ID)}
    return descriptor(LAYER_TYPES[layer.compression], layer.blob, annotations)


class ImageSource(Protocol):
    """An image that holds a bundle: the layer with the bundle, and how to get its blob."""

    layer: BundleLayer
    label: str

    def fill(self, partial: Partial) -> None:
        """Completes the file with the layer's blob."""
        ...

    def read_head(self) -> Head:
        """Reads the first files of the layer, unverified."""
        ...


class RegistryImage:
    """An image in a registry."""

    def __init__(self, remote: RegistryRemote, layer: BundleLayer, conduct: Conduct) -> None:
        self.layer, self.label = layer, remote.label
        self._remote, self._retry = remote, conduct.retry
        self._sources = Sources((remote,), conduct)

    def fill(self, partial: Partial) -> None:
        """See `ImageSource.fill`."""
        self._sources.fill(self.layer.blob, partial)

    def read_head(self) -> Head:
        """See `ImageSource.read_head`. Raises RemoteError."""
        return self._retry.call(self._try_head)

    def _try_head(self) -> Head:
        with self._remote.read(self.layer.blob) as download:
            return _head_of(cast("BinaryIO", _Chunks(download.chunks)), self.layer)


class LayoutImage:
    """The image of a layout with a tag (None: the only image). Raises as `Layout.find` does."""

    def __init__(self, root: Path, tag: str | None) -> None:
        self._layout = Layout(root)
        self.label = f"{root}:{tag}" if tag else str(root)
        layer = bundle_layer_of(self._layout.find(tag).manifest)
        if layer is None:
            raise _no_bundle(self.label)
        self.layer = layer

    def fill(self, partial: Partial) -> None:
        """See `ImageSource.fill`."""
        partial.restart()
        for chunk in verified_chunks(self._layout.blob_path(self.layer.blob), self.layer.blob):
            partial.write(chunk)

    def read_head(self) -> Head:
        """See `ImageSource.read_head`. Raises CorruptError."""
        path = self._layout.blob_path(self.layer.blob)
        try:
            with open(open_descriptor(path), "rb") as file:
                return _head_of(file, self.layer)
        except OSError as error:
            raise store_error("read", path, error) from error


class _Chunks:
    """A readable file over bytes that come in chunks, for a decompressor."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest, self._position = chunks, b"", 0

    def read(self, size: int = -1) -> bytes:
        """Returns at most `size` bytes; empty at the end."""
        if not self._rest:
            self._rest = next(self._chunks, b"")
        data = self._rest if size < 0 else self._rest[:size]
        self._rest = self._rest[len(data) :]
        self._position += len(data)
        return data

    def tell(self) -> int:
        """Returns how many bytes were read."""
        return self._position


def pull_image(
    source: ImageSource,
    out: Path,
    policy: TrustPolicy = ANY_BUNDLE,
    expect: Callable[[int], None] = lambda _: None,
) -> Bundle:
    """Replaces `out` by the bundle in the image, and returns the opened bundle. Continues an interrupted pull.

    Raises:
        CorruptError: the layer does not hold exactly one whole bundle, holds another than the image says, or is larger than
            the bundle can be.
        UntrustedError: `policy` does not allow the bundle. Then nothing was written.
        RemoteError, StoreError: the image cannot be read, or `out` cannot be written.
    """
    max_bytes = _accepted_bytes(source, out, policy)
    expect(source.layer.blob.size_bytes)
    with staging_directory(out) as staging:
        blob = staging / PARTIAL_NAME / "layer"
        receive(
            source.layer.blob, blob.with_name(source.layer.blob.sha256), blob, source.fill, is_staged=True
        )
        _clear(staging)
        try:
            index_bytes = _unpack(blob, source.layer, staging, max_bytes)
        except BaseException:
            _clear(staging)
            raise
        if sha256_bytes(index_bytes) != source.layer.index_sha256:
            raise CorruptError(f"{source.label}: the bundle in the layer is another than the image says")
        bundle = open_bundle(staging, policy)
        publish(staging, out, DOCUMENT_NAMES, bundle.index.objects)
    return open_bundle(out, policy)


def push_image(
    layout: Layout, written: WrittenImage, remote: RegistryRemote, tag: str, conduct: Conduct
) -> tuple[str, int]:
    """Uploads the config and layers of the written image that the registry lacks, and then its manifest as `tag`.

    Returns a reference to exactly this image, and how many bytes were uploaded. Raises CorruptError, RemoteError.
    """
    image = layout.find(None)
    digests = {row.content for row in (image.manifest.config, *image.manifest.layers)}
    files = {digest: layout.blob_path(digest) for digest in digests}
    _, num_bytes = send(remote, files, conduct)
    digest = conduct.retry.call(lambda: remote.put_manifest(tag, image.manifest_bytes))
    if digest != f"sha256:{written.manifest.sha256}":
        raise CorruptError(f"{layout.root}: was changed while it was pushed")
    return f"{remote.label}@{digest}", num_bytes


def find_image(remote: RegistryRemote, name: str, conduct: Conduct) -> RegistryImage | None:
    """Returns the image that `name` means in a registry; None if it does not hold a bundle.

    Raises RemoteError.
    """
    layer = conduct.retry.call(lambda: remote.find_layer(name))
    return None if layer is None else RegistryImage(remote, layer, conduct)


def _head_of(file: BinaryIO, layer: BundleLayer) -> Head:
    with open_layer(file, layer.media_type) as archive:
        return read_head(archive)


def _accepted_bytes(source: ImageSource, out: Path, policy: TrustPolicy) -> int:
    """Returns how many bytes the layer's archive may have, according to its index.

    Raises CorruptError, UntrustedError or StoreError if the layer must not or cannot be received.
    """
    layer, head = source.layer, source.read_head()
    if sha256_bytes(head.index_bytes) != layer.index_sha256:
        raise CorruptError(f"{source.label}: the bundle in the layer is another than the image says")
    policy.require_signature(head.signature, head.index_bytes, Path(source.label))
    index = load_index(head.index_bytes)
    num_bytes = largest_archive_bytes(index)
    largest = num_bytes + num_bytes // 64  # Incompressible data becomes a little larger.
    if num_bytes > MAX_ARCHIVE_BYTES or layer.blob.size_bytes > largest:
        raise CorruptError(
            f"{source.label}: claims a layer of {layer.blob.size_bytes} bytes for a bundle of"
            f" {index.counts.object_bytes} (at most {min(largest, MAX_ARCHIVE_BYTES)} are received)"
        )
    require_room(out.parent, layer.blob.size_bytes + sum(digest.size_bytes for digest in index.objects))
    return num_bytes


def _unpack(blob: Path, layer: BundleLayer, staging: Path, max_bytes: int) -> bytes:
    """Unpacks at most `max_bytes` into `staging`, and returns the bytes of the index."""
    with blob.open("rb") as file, open_layer(file, layer.media_type, max_bytes) as archive:
        unpack_bundle(archive, DirectorySink(staging))
    return (staging / INDEX_NAME).read_bytes()


def _clear(staging: Path) -> None:
    """Removes the files that an earlier attempt unpacked, but keeps those that it received."""
    shutil.rmtree(staging / OBJECTS_NAME, ignore_errors=True)
    for name in DOCUMENT_NAMES:
        with contextlib.suppress(FileNotFoundError):
            (staging / name).unlink()


def _no_bundle(label: str) -> SpecError:
    return SpecError(
        label,
        "is no image of a bundle: no layer of it is marked as one",
        "an image that `aotgaudi build image` wrote",
    )
