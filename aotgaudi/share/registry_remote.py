"""A repository of an OCI registry as a remote: objects are blobs, bundles and records are artifacts whose layers they are.

A bundle is an artifact manifest::

    config   the bundle's index                    application/vnd.aotgaudi.bundle.index.v1+json
    layers   manifest, receipt and every object    application/vnd.aotgaudi.bundle.object.v1
             the signature, if there is one        application/vnd.dsse.envelope.v1+json

and a record, under the tag ``record-<key>``::

    config   the record                            application/vnd.aotgaudi.record.v1+json
    layers   every object that it names            application/vnd.aotgaudi.bundle.object.v1

Layers are listed so that a registry that collects garbage keeps them. An image that `build image` wrote holds a bundle
too: its layer is annotated with the digest of the bundle's index.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from aotgaudi.digest import Digest
from aotgaudi.errors import ManifestError, RemoteError, SpecError
from aotgaudi.share.oci_documents import (
    BUNDLE_INDEX,
    BUNDLE_INDEX_TYPE,
    BUNDLE_OBJECT_TYPE,
    RECORD_TYPE,
    SIGNATURE_TYPE,
    Descriptor,
    ImageIndex,
    ImageManifest,
    descriptor,
    dump_manifest,
    load_document,
)
from aotgaudi.share.registry import Registry
from aotgaudi.share.registry_client import RegistryClient
from aotgaudi.share.remote import Download, Pointer, check_name
from aotgaudi.store.records import LARGEST_RECORD_BYTES


@dataclass(frozen=True, slots=True)
class BundleLayer:
    """The layer of an image that holds a bundle, and the sha256 of that bundle's index (64 hex digits)."""

    blob: Digest
    media_type: str
    index_sha256: str


class RegistryRemote:
    """See `remote.Remote`. A reference with a digest is read-only, and gives that bundle alone."""

    def __init__(self, client: RegistryClient) -> None:
        self.registry = Registry(client)
        self.label = client.reference.label
        self._digest = client.reference.digest
        self._manifests: dict[str, ImageManifest] = {}

    def has(self, digest: Digest) -> bool:
        """See `Remote.has`."""
        return self.registry.has_blob(digest)

    def read(self, digest: Digest, offset: int = 0) -> AbstractContextManager[Download]:
        """See `Remote.read`."""
        return self.registry.read_blob(digest, offset)

    def put(self, digest: Digest, path: Path) -> None:
        """See `Remote.put`. The registry hashes what it gets."""
        self._require_tag()
        self.registry.put_blob(digest, path)

    def get_record(self, key: str) -> bytes | None:
        """See `Remote.get_record`."""
        found = self.registry.get_manifest(record_tag(key))
        if found is None:
            return None
        manifest = self._parse(found.data, record_tag(key))
        record = manifest.config.content
        if manifest.config.media_type != RECORD_TYPE or record.size_bytes > LARGEST_RECORD_BYTES:
            return b""  # Some other thing, under that tag: no record.
        with self.registry.read_blob(record) as download:
            data = b""
            for chunk in download.chunks:
                data += chunk
                if len(data) > record.size_bytes:
                    break
        return data

    def put_record(self, key: str, data: bytes, digests: Iterable[Digest]) -> None:
        """See `Remote.put_record`."""
        self._require_tag()
        record = self._put_small(data)
        self.registry.put_manifest(record_tag(key), dump_record_manifest(record, digests))

    def resolve(self, name: str) -> Pointer | None:
        """See `Remote.resolve`."""
        manifest = self._manifest(name)
        return None if manifest is None else pointer_of(manifest, f"{self.label}:{name}")

    def find_layer(self, name: str) -> BundleLayer | None:
        """Returns the layer that holds a bundle, where `name` is an image that has one; None otherwise."""
        manifest = self._manifest(name)
        return None if manifest is None else bundle_layer_of(manifest)

    def publish(self, name: str, pointer: Pointer, digests: Iterable[Digest]) -> str:
        """See `Remote.publish`. Returns the reference with the digest of the artifact manifest."""
        self._require_tag()
        data = dump_bundle(pointer, digests)
        return f"{self.label}@{self.registry.put_manifest(check_name(name), data)}"

    def _manifest(self, name: str) -> ImageManifest | None:
        """What `name`, or the digest of the reference, means; resolved once, and then remembered."""
        reference = self._digest or check_name(name)
        if reference not in self._manifests:
            found = self.registry.get_manifest(reference)
            if found is None:
                return None
            self._manifests[reference] = self._parse(found.data, reference)
        return self._manifests[reference]

    def _parse(self, data: bytes, reference: str) -> ImageManifest:
        noun = f"{self.label}: manifest {reference}"
        try:
            return load_document(data, ImageManifest, noun)
        except ManifestError as error:
            try:
                load_document(data, ImageIndex, noun)
            except ManifestError:
                raise RemoteError(str(error)) from error
            raise RemoteError(f"{noun} is of several platforms; name the digest of one of them") from error

    def _put_small(self, data: bytes) -> Digest:
        digest = Digest.of(data)
        if not self.registry.has_blob(digest):
            self.registry.put_bytes(digest, data)
        return digest

    def _require_tag(self) -> None:
        if self._digest is not None:
            raise SpecError(f"{self.label}@{self._digest}", "names a digest", "a tag, to push to")


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
    """Returns the pointer to the bundle that an artifact manifest describes. Raises RemoteError if it describes none."""
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
