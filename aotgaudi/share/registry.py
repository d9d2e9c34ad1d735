"""What a registry does for us: blobs by digest, manifests by tag or digest (opencontainers/distribution-spec, v1.1).

A tag is resolved once; what it named then is fetched by digest. The bytes of a manifest are hashed here, and must have
the digest that was asked for, and the one that the registry says they have.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

from aotgaudi.digest import Digest, sha256_bytes
from aotgaudi.errors import CorruptError, MissingObjectError, RemoteError, StoreError, store_error
from aotgaudi.share.oci_documents import (
    IMAGE_INDEX_TYPE,
    IMAGE_MANIFEST_TYPE,
    MAX_MANIFEST_BYTES,
    is_sha256,
)
from aotgaudi.share.registry_client import RegistryClient
from aotgaudi.share.remote import Download

_CHUNK_BYTES = 64 << 10
_OCTETS = "application/octet-stream"
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-[0-9]{1,19}/(?:[0-9]{1,19}|\*)")


@dataclass(frozen=True, slots=True)
class FoundManifest:
    """A manifest's bytes, and ``sha256:<hex>`` of them."""

    data: bytes
    digest: str


class FileBody:
    """A file as the body of a request, read again each time it is sent: a challenge makes a request go out twice.

    `failure` is what was wrong with the file, if that made sending fail.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path, self._size_bytes = path, size_bytes
        self.failure: StoreError | None = None

    def __len__(self) -> int:
        """Bytes."""
        return self._size_bytes

    def __iter__(self) -> Iterator[bytes]:
        """Yields exactly `len` bytes. Raises StoreError."""
        rest = self._size_bytes
        try:
            with self._path.open("rb", buffering=0) as file:
                while rest and (chunk := file.read(min(rest, _CHUNK_BYTES))):
                    rest -= len(chunk)
                    yield chunk
        except OSError as error:
            self.failure = store_error("read", self._path, error)
            raise self.failure from error
        if rest:
            self.failure = StoreError(f"{self._path} has fewer than {self._size_bytes} bytes")
            raise self.failure


class Registry:
    """One repository of a registry. Safe in threads. Methods raise TransientError and RemoteError."""

    def __init__(self, client: RegistryClient) -> None:
        self.client = client
        self.label = client.reference.label

    def has_blob(self, digest: Digest) -> bool:
        """Whether the blob is there, with the right size."""
        with self.client.request("HEAD", _blob(digest), (200, 404)) as response:
            size = response.headers.get("Content-Length")
            return response.status_code == 200 and size in (None, str(digest.size_bytes))

    @contextlib.contextmanager
    def read_blob(self, digest: Digest, offset: int = 0) -> Iterator[Download]:
        """Opens a blob, from `offset` on where the registry can. Raises MissingObjectError."""
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        with self.client.request("GET", _blob(digest), (200, 206, 404, 416), headers=headers) as response:
            if response.status_code == 404:
                raise MissingObjectError(f"{self.label} has no object {digest}")
            if response.status_code == 416:  # It is shorter than what we have of it: from the start, then.
                yield Download(0, iter(()))
                return
            start = _range_start(response) if response.status_code == 206 else 0
            yield Download(start, self.client.chunks(response, digest.size_bytes - max(start, 0)))

    def put_blob(self, digest: Digest, path: Path) -> None:
        """Uploads the file at `path` as the blob `digest`, in one piece; the registry refuses another's bytes."""
        body = FileBody(path, digest.size_bytes)
        try:
            self._upload(digest, body if len(body) else b"")
        except RemoteError as error:
            if body.failure is not None:
                raise body.failure from error
            raise

    def put_bytes(self, digest: Digest, data: bytes) -> None:
        """Uploads `data` as the blob `digest`."""
        self._upload(digest, data)

    def _upload(self, digest: Digest, body: FileBody | bytes) -> None:
        with self.client.request("POST", "blobs/uploads/", (202,)) as response:
            location = response.headers.get("Location", "")
        if not location:
            raise RemoteError(f"{self.label}: began an upload and did not say where it goes")
        url = _with_digest(location, digest)
        headers = {"Content-Type": _OCTETS, "Content-Length": str(len(body))}
        with self.client.request("PUT", url, (201,), headers=headers, data=body) as response:
            _check_named(self.label, response, f"sha256:{digest.sha256}")

    def get_manifest(self, reference: str) -> FoundManifest | None:
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
        return FoundManifest(data, digest)

    def put_manifest(self, reference: str, data: bytes, media_type: str = IMAGE_MANIFEST_TYPE) -> str:
        """Uploads a manifest as a tag (or its own digest), and returns its digest."""
        digest = f"sha256:{sha256_bytes(data)}"
        headers = {"Content-Type": media_type}
        with self.client.request("PUT", _manifest(reference), (201,), headers=headers, data=data) as response:
            _check_named(self.label, response, digest)
        return digest


def _blob(digest: Digest) -> str:
    return f"blobs/sha256:{digest.sha256}"


def _manifest(reference: str) -> str:
    return f"manifests/{quote(reference, safe=':')}"


def _with_digest(location: str, digest: Digest) -> str:
    """The place of an upload, which may carry a query of the registry's own, with the digest."""
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
