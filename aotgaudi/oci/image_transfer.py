"""Pushing an image that was written, and taking the bundle out of one: of a registry, or of a layout."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from aotgaudi.bundle.bundle import ANY_BUNDLE, Acceptance, Bundle, open_bundle
from aotgaudi.bundle.format import INDEX_NAME, MANIFEST_NAME, OBJECTS_NAME, RECEIPT_NAME, SIGNATURE_NAME
from aotgaudi.bundle.staging import PARTIAL_NAME, publish, staging_directory
from aotgaudi.digest import Digest, sha256_bytes
from aotgaudi.errors import CorruptError, SpecError
from aotgaudi.oci.image import WrittenImage
from aotgaudi.oci.layer import open_layer
from aotgaudi.oci.layout import Layout
from aotgaudi.oci.unpack import DirectorySink, unpack_bundle
from aotgaudi.remotes.receiving import Partial, receive
from aotgaudi.remotes.registry import Registry
from aotgaudi.remotes.registry_remote import BundleLayer, RegistryRemote, bundle_layer_of
from aotgaudi.remotes.transfer import Conduct, Sources, in_threads
from aotgaudi.store.blobs import verified_chunks

_DOCUMENTS = (INDEX_NAME, MANIFEST_NAME, RECEIPT_NAME, SIGNATURE_NAME)


class ImageSource(Protocol):
    """An image with a bundle in it: which layer that is, and how to get its blob."""

    layer: BundleLayer
    label: str

    def fill(self, partial: Partial) -> None:
        """Completes the file with the layer's blob."""
        ...


class RegistryImage:
    """An image in a registry."""

    def __init__(self, remote: RegistryRemote, layer: BundleLayer, conduct: Conduct) -> None:
        self.layer, self.label = layer, remote.label
        self._sources = Sources((remote,), conduct)

    def fill(self, partial: Partial) -> None:
        """See `ImageSource.fill`."""
        self._sources.fill(self.layer.blob, partial)


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


def pull_image(
    source: ImageSource,
    out: Path,
    acceptance: Acceptance = ANY_BUNDLE,
    expect: Callable[[int], None] = lambda _: None,
) -> Bundle:
    """Makes `out` the bundle in the image, and returns it opened. What an interrupted pull has received is used.

    Raises CorruptError for a layer that is not that of one whole bundle, or of another than the image says;
    UntrustedError where `acceptance` does not allow it; RemoteError, and StoreError.
    """
    expect(source.layer.blob.size_bytes)
    with staging_directory(out) as staging:
        blob = staging / PARTIAL_NAME / "layer"
        receive(
            source.layer.blob, blob.with_name(source.layer.blob.sha256), blob, source.fill, is_staged=True
        )
        _clear(staging)
        try:
            index_bytes = _unpack(blob, source.layer, staging)
        except BaseException:
            _clear(staging)
            raise
        if sha256_bytes(index_bytes) != source.layer.index_sha256:
            raise CorruptError(f"{source.label}: the bundle in the layer is another than the image says")
        bundle = open_bundle(staging, acceptance)
        publish(staging, out, _DOCUMENTS, bundle.index.objects)
    return open_bundle(out, acceptance)


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


def _unpack(blob: Path, layer: BundleLayer, staging: Path) -> bytes:
    """Unpacks into `staging`; returns the bytes of the index."""
    with blob.open("rb") as file, open_layer(file, layer.media_type) as archive:
        unpack_bundle(archive, DirectorySink(staging))
    return (staging / INDEX_NAME).read_bytes()


def _clear(staging: Path) -> None:
    """Removes what an earlier attempt has unpacked, and keeps what was received."""
    shutil.rmtree(staging / OBJECTS_NAME, ignore_errors=True)
    for name in _DOCUMENTS:
        with contextlib.suppress(FileNotFoundError):
            (staging / name).unlink()


def _no_bundle(label: str) -> SpecError:
    return SpecError(
        label,
        "is no image of a bundle: no layer of it is marked as one",
        "an image that `aotgaudi build image` wrote",
    )
