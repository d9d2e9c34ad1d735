"""A repository of an OCI registry as a remote (opencontainers/distribution-spec, v1.1).

A tag is resolved once, and its manifest is from then on fetched by digest. We hash the bytes of a manifest. They must have
the digest that we asked for and the one that the registry states.

Objects are blobs. Bundles and records are artifacts whose layers are these objects. A bundle is an artifact manifest::

    config   the bundle's index                    application/vnd.aotgaudi.bundle.index.v1+json
    layers   manifest, receipt and every object    application/vnd.aotgaudi.bundle.object.v1
             the signature, if there is one        application/vnd.dsse.envelope.v1+json

and a record, under the tag ``record-<key>``::

    config   the record                            application/vnd.aotgaudi.record.v1+json
    layers   every object that it names            application/vnd.aotgaudi.bundle.object.v1

Objects are listed as layers so that the registry's garbage collection keeps them. An image that `build image` wrote also
holds a bundle. Its layer is annotated with the digest of the bundle's index.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

from aotgaudi.digest import Digest, sha256_bytes
from aotgaudi.errors import (
    CorruptError,
    ManifestError,
    MissingObjectError,
    RemoteError,
    SpecError,
)
from aotgaudi.share.http_session import Body, FileBody
from aotgaudi.share.oci import (
    BUNDLE_INDEX,
    BUNDLE_INDEX_TYPE,
    BUNDLE_OBJECT_TYPE,
    IMAGE_INDEX_TYPE,
    IMAGE_MANIFEST_TYPE,
    MAX_MANIFEST_BYTES,
    RECORD_TYPE,
    SIGNATURE_TYPE,
    Descriptor,
    ImageIndex,
    ImageManifest,
    descriptor,
    dump_manifest,
    is_sha256,
    load_document,
)
from aotgaudi.share.registry_client import RegistryClient
from aotgaudi.share.remote import Download, Pointer, check_name
from aotgaudi.store.records import LARGEST_RECORD_BYTES

_OCTETS = "application/octet-stream"
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-[0-9]{1,19}/(?:[0-9]{1,19}|\*)")


def _blob(digest: Digest) -> str:
    return f"blobs/sha256:{digest.sha256}"


def _manifest(reference: str) -> str:
    return f"manifests/{quote(reference, safe=':')}"


def _with_digest(location: str, digest: Digest) -> str:
    """Returns the URL of an upload with the digest added. The URL may already have a query."""
    parts = urlsplit(location)
    query = "&".join(filter(None, (parts.query, urlencode({"digest": f"sha256:{digest.sha256}"}))))
    return urlunsplit(parts._replace(query=query))


def _range_start(response: Any) -> int:
    found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    return int(found[1]) if found else -1


def _check_named(label: str, response: Any, digest: str) -> None:
    named = response.headers.get("Docker-Content-Digest")
    if named is not None and is_sha256(named) and named != digest:
        raise CorruptError(f"{label}: names {named} what has the digest {digest}")


@dataclass(frozen=True, slots=True)
class BundleLayer:
    """The layer of an image that holds a bundle, and the sha256 of the bundle's index (64 hex digits)."""

    blob: Digest
    media_type: str
    index_sha256: str


class RegistryRemote:
    """A registry as a `remote.Remote`. A reference with a digest is read-only and means only that bundle. Thread-safe."""

    def __init__(self, client: RegistryClient) -> None:
        self.client = client
        self.label = client.reference.label
        self._digest = client.reference.digest
        self._manifests: dict[str, ImageManifest] = {}

    def has(self, digest: Digest) -> bool:
        """See `Remote.has`."""
        with self.client.request("HEAD", _blob(digest), (200, 404)) as response:
            size = response.headers.get("Content-Length")
            return response.status_code == 200 and size in (None, str(digest.size_bytes))

    @contextlib.contextmanager
    def read(self, digest: Digest, offset: int = 0) -> Iterator[Download]:
        """See `Remote.read`."""
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        with self.client.request("GET", _blob(digest), (200, 206, 404, 416), headers=headers) as response:
            if response.status_code == 404:
                raise MissingObjectError(f"{self.label} has no object {digest}")
            if response.status_code == 416:  # The blob is shorter than what we have. Start again.
                yield Download(0, iter(()))
                return
            start = _range_start(response) if response.status_code == 206 else 0
            yield Download(start, self.client.chunks(response, digest.size_bytes - max(start, 0)))

    def put(self, digest: Digest, path: Path) -> None:
        """See `Remote.put`. The file is sent in one piece, and the registry hashes it."""
        self._require_tag()
        body = FileBody(path, digest.size_bytes)
        try:
            self.put_bytes(digest, body if len(body) else b"")
        except RemoteError as error:
            if body.failure is not None:
                raise body.failure from error
            raise

    def put_bytes(self, digest: Digest, body: Body) -> None:
        """Uploads a blob, which the registry hashes."""
        with self.client.request("POST", "blobs/uploads/", (202,)) as response:
            location = response.headers.get("Location", "")
        if not location:
            raise RemoteError(f"{self.label}: began an upload and did not say where it goes")
        url = _with_digest(location, digest)
        headers = {"Content-Type": _OCTETS, "Content-Length": str(len(body))}
        with self.client.request("PUT", url, (201,), headers=headers, data=body) as response:
            _check_named(self.label, response, f"sha256:{digest.sha256}")

    def get_manifest(self, reference: str) -> bytes | None:
        """Returns the manifest of a tag or digest; None if the registry has none. Raises CorruptError."""
        headers = {"Accept": f"{IMAGE_MANIFEST_TYPE}, {IMAGE_INDEX_TYPE}"}
        with self.client.request("GET", _manifest(reference), (200, 404), headers=headers) as response:
            if response.status_code == 404:
                return None
            data = self.client.read_document(response, MAX_MANIFEST_BYTES)
            if len(data) > MAX_MANIFEST_BYTES:
                raise RemoteError(
                    f"{self.label}: manifest {reference} has more than {MAX_MANIFEST_BYTES} bytes"
                )
            digest = f"sha256:{sha256_bytes(data)}"
            _check_named(self.label, response, digest)
        if is_sha256(reference) and reference != digest:
            raise CorruptError(f"{self.label}: manifest {reference} came with other bytes: {digest}")
        return data

    def put_manifest(self, reference: str, data: bytes) -> str:
        """Uploads a manifest as a tag (or its own digest), and returns its digest."""
        digest = f"sha256:{sha256_bytes(data)}"
        headers = {"Content-Type": IMAGE_MANIFEST_TYPE}
        with self.client.request("PUT", _manifest(reference), (201,), headers=headers, data=data) as response:
            _check_named(self.label, response, digest)
        return digest

    def get_record(self, key: str) -> bytes | None:
        """See `Remote.get_record`."""
        found = self.get_manifest(record_tag(key))
        if found is None:
            return None
        manifest = self._parse(found, record_tag(key))
        record = manifest.config.content
        if manifest.config.media_type != RECORD_TYPE or record.size_bytes > LARGEST_RECORD_BYTES:
            return b""  # The tag names something that is not a record.
        with self.read(record) as download:
            data = b""
            for chunk in download.chunks:
                data += chunk
                if len(data) > record.size_bytes:
                    break
        return data

    def put_record(self, key: str, data: bytes, digests: Iterable[Digest]) -> None:
        """See `Remote.put_record`."""
        self._require_tag()
        record = Digest.of(data)
        if not self.has(record):
            self.put_bytes(record, data)
        self.put_manifest(record_tag(key), dump_record_manifest(record, digests))

    def resolve(self, name: str) -> Pointer | None:
        """See `Remote.resolve`."""
        manifest = self._manifest(name)
        return None if manifest is None else pointer_of(manifest, f"{self.label}:{name}")

    def find_layer(self, name: str) -> BundleLayer | None:
        """Returns the layer that holds a bundle if `name` is an image with one; else None."""
        manifest = self._manifest(name)
        return None if manifest is None else bundle_layer_of(manifest)

    def publish(self, name: str, pointer: Pointer, digests: Iterable[Digest]) -> str:
        """See `Remote.publish`. The returned reference has the digest of the artifact manifest."""
        self._require_tag()
        return f"{self.label}@{self.put_manifest(check_name(name), dump_bundle(pointer, digests))}"

    def _manifest(self, name: str) -> ImageManifest | None:
        """Returns the manifest that `name`, or the digest of the reference, means. Resolves it only once."""
        reference = self._digest or check_name(name)
        if reference not in self._manifests:
            found = self.get_manifest(reference)
            if found is None:
                return None
            self._manifests[reference] = self._parse(found, reference)
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

    def _require_tag(self) -> None:
        if self._digest is not None:
            raise SpecError(f"{self.label}@{self._digest}", "names a digest", "a tag, to push to")


def record_tag(key: str) -> str:
    """Returns the tag of a record."""
    return f"record-{key}"


def dump_bundle(pointer: Pointer, digests: Iterable[Digest]) -> bytes:
    """Returns the artifact manifest of a bundle. `digests` are all its files. Raises ManifestError if there are too many."""
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
    if (
        not layers
    ):  # Not every registry takes a manifest without layers (opencontainers/image-spec v1.1, manifest.md).
        layers = [descriptor(RECORD_TYPE, record)]
    return dump_manifest(descriptor(RECORD_TYPE, record), layers, {}, RECORD_TYPE)


def pointer_of(manifest: ImageManifest, label: str) -> Pointer:
    """Returns the pointer to the bundle that an artifact manifest describes. Raises RemoteError if it is not a bundle's."""
    if manifest.config.media_type != BUNDLE_INDEX_TYPE:
        raise RemoteError(f"{label} is no bundle: its config is of type {manifest.config.media_type!r:.100}")
    signatures = [row.content for row in manifest.layers if row.media_type == SIGNATURE_TYPE]
    return Pointer(index=manifest.config.content, signature=signatures[0] if signatures else None)


def bundle_layer_of(manifest: ImageManifest) -> BundleLayer | None:
    """Returns the last layer of an image that is marked as a bundle's; None if there is none."""
    marked = [(row, _marked_index(row)) for row in manifest.layers]
    layers = [
        BundleLayer(row.content, row.media_type, sha256) for row, sha256 in marked if sha256 is not None
    ]
    return layers[-1] if layers else None


def sorted_digests(digests: Iterable[Digest]) -> list[Digest]:
    """Returns the digests in a fixed order, without repetitions."""
    return sorted(set(digests), key=lambda digest: digest.sha256)


def _marked_index(row: Descriptor) -> str | None:
    text = (row.annotations or {}).get(BUNDLE_INDEX)
    return None if text is None else text.removeprefix("sha256:")
