"""A repository of an OCI registry as a remote: objects are blobs, records and bundles are artifacts (artifact.py)."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from aotgaudi.digest import Digest
from aotgaudi.errors import ManifestError, RemoteError, SpecError
from aotgaudi.oci.artifact import (
    BundleLayer,
    bundle_layer_of,
    dump_bundle,
    dump_record_manifest,
    pointer_of,
    record_tag,
)
from aotgaudi.oci.client import RegistryClient
from aotgaudi.oci.documents import RECORD_TYPE, ImageIndex, ImageManifest, load_document
from aotgaudi.oci.registry import Registry
from aotgaudi.remotes.remote import Download, Pointer, check_name
from aotgaudi.store.records import LARGEST_RECORD_BYTES


class RegistryRemote:
    """See `remote.Remote`. A reference that names a digest can be read from, and only that bundle."""

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
