"""How bundles and records lie in a registry: as artifacts, whose layers are the very objects.

A bundle is an artifact manifest::

    config   the bundle's index                    application/vnd.aotgaudi.bundle.index.v1+json
    layers   manifest, receipt and every object    application/vnd.aotgaudi.bundle.object.v1
             the signature, if there is one        application/vnd.dsse.envelope.v1+json

and a record, under the tag ``record-<key>``::

    config   the record                            application/vnd.aotgaudi.record.v1+json
    layers   every object that it names            application/vnd.aotgaudi.bundle.object.v1

Layers are listed so that a registry that collects garbage keeps them. An image that `build image` wrote holds a bundle
too: its layer is marked with the digest of the bundle's index.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aotgaudi.digest import Digest
from aotgaudi.errors import RemoteError
from aotgaudi.oci.documents import (
    BUNDLE_INDEX_TYPE,
    BUNDLE_OBJECT_TYPE,
    RECORD_TYPE,
    SIGNATURE_TYPE,
    Descriptor,
    ImageManifest,
    descriptor,
    dump_manifest,
)
from aotgaudi.oci.labels import BUNDLE_INDEX
from aotgaudi.remotes.remote import Pointer


@dataclass(frozen=True, slots=True)
class BundleLayer:
    """The layer of an image that holds a bundle, and the sha256 of that bundle's index (64 hex digits)."""

    blob: Digest
    media_type: str
    index_sha256: str


def record_tag(key: str) -> str:
    """Returns the tag of a record."""
    return f"record-{key}"


def dump_bundle(pointer: Pointer, digests: Iterable[Digest]) -> bytes:
    """Returns the artifact manifest of a bundle. `digests` are all its files. Raises ManifestError: too many."""
    own = {pointer.index, pointer.signature}
    layers = [
        descriptor(BUNDLE_OBJECT_TYPE, digest) for digest in sorted_digests(digests) if digest not in own
    ]
    if pointer.signature is not None:
        layers.append(descriptor(SIGNATURE_TYPE, pointer.signature))
    return dump_manifest(descriptor(BUNDLE_INDEX_TYPE, pointer.index), layers, {}, BUNDLE_INDEX_TYPE)


def dump_record_manifest(record: Digest, digests: Iterable[Digest]) -> bytes:
    """Returns the artifact manifest of a record and the objects that it names."""
    layers = [descriptor(BUNDLE_OBJECT_TYPE, digest) for digest in sorted_digests(digests)]
    return dump_manifest(descriptor(RECORD_TYPE, record), layers, {}, RECORD_TYPE)


def pointer_of(manifest: ImageManifest, label: str) -> Pointer:
    """Returns which bundle an artifact manifest is. Raises RemoteError where it is none."""
    if manifest.config.media_type != BUNDLE_INDEX_TYPE:
        raise RemoteError(f"{label} is no bundle: its config is of type {manifest.config.media_type!r:.100}")
    signatures = [row.content for row in manifest.layers if row.media_type == SIGNATURE_TYPE]
    return Pointer(index=manifest.config.content, signature=signatures[0] if signatures else None)


def bundle_layer_of(manifest: ImageManifest) -> BundleLayer | None:
    """Returns the layer of an image that is marked as a bundle's, the last of them; None where none is."""
    marked = [(row, _marked_index(row)) for row in manifest.layers]
    layers = [
        BundleLayer(row.content, row.media_type, sha256) for row, sha256 in marked if sha256 is not None
    ]
    return layers[-1] if layers else None


def sorted_digests(digests: Iterable[Digest]) -> list[Digest]:
    """Returns each digest once, in a fixed order."""
    return sorted(set(digests), key=lambda digest: digest.sha256)


def _marked_index(row: Descriptor) -> str | None:
    text = (row.annotations or {}).get(BUNDLE_INDEX)
    return None if text is None else text.removeprefix("sha256:")
