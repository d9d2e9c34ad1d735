"""Pushing an image that was written, and taking the bundle out of one: of a registry, or of a layout.

Before a layer is received, its first files are read: the index, which must be the one that the image names, and the
signature, which must be a trusted key's where one is demanded. What they say is how large the layer may be.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from aotgaudi.bundle.bundle import Bundle, open_bundle
from aotgaudi.bundle.format import (
    DOCUMENT_NAMES,
    INDEX_NAME,
    OBJECTS_NAME,
    load_index,
)
from aotgaudi.bundle.staging import PARTIAL_NAME, publish, staging_directory
from aotgaudi.bundle.trust import ANY_BUNDLE, TrustPolicy
from aotgaudi.digest import Digest, sha256_bytes
from aotgaudi.errors import CorruptError, SpecError, store_error
from aotgaudi.files import open_descriptor
from aotgaudi.share.image import WrittenImage
from aotgaudi.share.layer import MAX_ARCHIVE_BYTES, open_layer
from aotgaudi.share.layout import Layout
from aotgaudi.share.receiving import Partial, receive, require_room
from aotgaudi.share.registry import Registry
from aotgaudi.share.registry_remote import BundleLayer, RegistryRemote, bundle_layer_of
from aotgaudi.share.transfer import Conduct, Sources, in_threads
from aotgaudi.share.unpack import DirectorySink, Head, largest_archive_bytes, read_head, unpack_bundle
from aotgaudi.store.cas import verified_chunks


class ImageSource(Protocol):
    """An image with a bundle in it: which layer that is, and how to get its blob."""

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
    """The image of a layout that has the tag; None: the only image. Raises as `Layout.find` does."""

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
    """As much of a file as a decompressor asks for, of what comes in chunks."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest, self._position = chunks, b"", 0

    def read(self, size: int = -1) -> bytes:
        """Returns at most `size` bytes; none at the end."""
        if not self._rest:
            self._rest = next(self._chunks, b"")
        data = self._rest if size < 0 else self._rest[:size]
        self._rest = self._rest[len(data) :]
        self._position += len(data)
        return data

    def tell(self) -> int:
        """How much was read, in bytes."""
        return self._position


def pull_image(
    source: ImageSource,
    out: Path,
    policy: TrustPolicy = ANY_BUNDLE,
    expect: Callable[[int], None] = lambda _: None,
) -> Bundle:
    """Makes `out` the bundle in the image, and returns it opened. What an interrupted pull has received is used.

    Raises CorruptError for a layer that is not that of one whole bundle, or of another than the image says, or larger than
    the bundle; UntrustedError where `policy` does not allow it: then nothing was written; RemoteError, and StoreError.
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
    layout: Layout, written: WrittenImage, registry: Registry, tag: str, conduct: Conduct
) -> tuple[str, int]:
    """Uploads what the registry lacks of the image that was written, config and layers, then its manifest as `tag`.

    Returns how to refer to just that image, and how many bytes were uploaded. Raises CorruptError, RemoteError.
    """
    image = layout.find(None)
    rows = (image.manifest.config, *image.manifest.layers)
    blobs = sorted({row.content for row in rows}, key=lambda digest: -digest.size_bytes)

    def send(digest: Digest) -> int:
        retry = conduct.retry
        is_new = not retry.call(lambda: registry.has_blob(digest))
        if is_new:
            retry.call(lambda: registry.put_blob(digest, layout.blob_path(digest)))
        conduct.advance(digest.size_bytes)
        return digest.size_bytes if is_new else 0

    num_bytes = sum(in_threads(send, blobs, conduct.num_threads))
    digest = conduct.retry.call(lambda: registry.put_manifest(tag, image.manifest_bytes))
    if digest != f"sha256:{written.manifest.sha256}":
        raise CorruptError(f"{layout.root}: was changed while it was pushed")
    return f"{registry.label}@{digest}", num_bytes


def find_image(remote: RegistryRemote, name: str, conduct: Conduct) -> RegistryImage | None:
    """Returns the image that `name` means in a registry, where it is one that holds a bundle; None otherwise.

    Raises RemoteError.
    """
    layer = conduct.retry.call(lambda: remote.find_layer(name))
    return None if layer is None else RegistryImage(remote, layer, conduct)


def _head_of(file: BinaryIO, layer: BundleLayer) -> Head:
    with open_layer(file, layer.media_type) as archive:
        return read_head(archive)


def _accepted_bytes(source: ImageSource, out: Path, policy: TrustPolicy) -> int:
    """Returns the most that the layer's archive may have, by its index.

    Raises CorruptError, UntrustedError or StoreError where the layer should not be received, or cannot be.
    """
    layer, head = source.layer, source.read_head()
    if sha256_bytes(head.index_bytes) != layer.index_sha256:
        raise CorruptError(f"{source.label}: the bundle in the layer is another than the image says")
    policy.require_signature(head.signature, head.index_bytes, Path(source.label))
    index = load_index(head.index_bytes)
    num_bytes = largest_archive_bytes(index)
    largest = num_bytes + num_bytes // 64  # What does not compress becomes a little larger.
    if num_bytes > MAX_ARCHIVE_BYTES or layer.blob.size_bytes > largest:
        raise CorruptError(
            f"{source.label}: claims a layer of {layer.blob.size_bytes} bytes for a bundle of"
            f" {index.counts.object_bytes} (at most {min(largest, MAX_ARCHIVE_BYTES)} are received)"
        )
    require_room(out.parent, layer.blob.size_bytes + sum(digest.size_bytes for digest in index.objects))
    return num_bytes


def _unpack(blob: Path, layer: BundleLayer, staging: Path, max_bytes: int) -> bytes:
    """Unpacks into `staging`, at most `max_bytes`; returns the bytes of the index."""
    with blob.open("rb") as file, open_layer(file, layer.media_type, max_bytes) as archive:
        unpack_bundle(archive, DirectorySink(staging))
    return (staging / INDEX_NAME).read_bytes()


def _clear(staging: Path) -> None:
    """Removes what an earlier attempt has unpacked, and keeps what was received."""
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
