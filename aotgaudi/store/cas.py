"""Content-addressed objects: immutable files named by the sha256 of their bytes.

Layout (version history in docs/formats/store.md)::

    objects/sha256/<first 2 hex digits>/<64 hex digits>    mode 0444
    tmp/put-<pid>-<random>                                 being written; harmless when its writer is dead

A write goes to ``tmp/`` (same file system, so that the rename is atomic), is hashed as it is copied, synced,
renamed into place, and the directory is synced: an object is whole or absent, whenever the power fails.
Writers need no lock: two writers of one digest write equal bytes, and the last rename wins.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, StoreError
from aotgaudi.store.blobs import Fault, find_fault, read_blob
from aotgaudi.store.faults import store_error

_CHUNK_BYTES = 1 << 20
_OBJECT_MODE = 0o444


def object_path(root: Path, digest: Digest) -> Path:
    """Returns where an object with this digest lies under `root` (a store's or a bundle's)."""
    return root / "objects" / "sha256" / digest.sha256[:2] / digest.sha256


def fsync_dir(path: Path) -> None:
    """Makes the names in a directory durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ObjectStore:
    """The objects under one root. Safe in threads and between processes.

    A `put` of bytes that are already stored re-hashes the stored object: an intact one is kept, a damaged
    one is replaced. A put is the one moment when the right bytes are at hand, so it is where damage mends.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._tmp = root / "tmp"

    def put_bytes(self, data: bytes) -> Digest:
        """Stores `data` and returns its digest. Raises StoreError; then nothing is left behind."""
        digest = Digest.of(data)
        try:
            if self._is_intact(digest):
                return digest
            with self._temporary_file() as file:
                file.write(data)
                self._publish(file, digest)
        except OSError as error:
            raise store_error("store an object in", self.root, error, needed_bytes=len(data)) from error
        return digest

    def put_file(self, path: Path) -> Digest:
        """Stores a copy of the file at `path` and returns its digest; what was hashed is what is stored.

        Raises StoreError when `path` is not a readable regular file or the store cannot be written to;
        then nothing is left behind.
        """
        with _open_source(path) as source:
            size_bytes = os.fstat(source.fileno()).st_size
            try:
                with self._temporary_file() as file:
                    digest = _copy_hashed(source, file)
                    if not self._is_intact(digest):
                        self._publish(file, digest)
            except OSError as error:
                doing = f"store {path.name} in"
                raise store_error(doing, self.root, error, needed_bytes=size_bytes) from error
        return digest

    def has(self, digest: Digest) -> bool:
        """Whether a regular file of the right size is there. One ``lstat``; does not read it."""
        try:
            status = object_path(self.root, digest).lstat()
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == digest.size_bytes

    def path(self, digest: Digest) -> Path:
        """Returns the path of an object that `has` finds; its bytes are not verified.

        Raises StoreError when it is absent and CorruptError when it has another size or is no file.
        """
        path = object_path(self.root, digest)
        if self.has(digest):
            return path
        self.verify(digest)
        return path  # It was published between the two looks.

    def read(self, digest: Digest) -> bytes:
        """Returns an object's bytes, verified. Raises StoreError (absent) and CorruptError."""
        data = read_blob(object_path(self.root, digest), digest)
        if isinstance(data, Fault):
            raise self._error(digest, data)
        return data

    def verify(self, digest: Digest) -> None:
        """Re-hashes one object. Raises StoreError (absent) and CorruptError."""
        fault = find_fault(object_path(self.root, digest), digest)
        if fault is not None:
            raise self._error(digest, fault)

    def discard(self, digest: Digest) -> None:
        """Removes an object if it is there, so that the next build makes it anew. Raises StoreError."""
        path = object_path(self.root, digest)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise store_error("remove", path, error) from error

    def digests(self) -> Iterator[Digest]:
        """Yields the digest that each stored object claims by name and size, unverified and unordered.

        Files of other names are passed over: a store tolerates what it did not write.
        """
        for path in (self.root / "objects" / "sha256").glob("[0-9a-f][0-9a-f]/*"):
            with contextlib.suppress(ValueError, FileNotFoundError):
                yield Digest.parse(f"sha256:{path.name}:{path.lstat().st_size}")

    def _is_intact(self, digest: Digest) -> bool:
        return self.has(digest) and find_fault(object_path(self.root, digest), digest) is None

    @contextlib.contextmanager
    def _temporary_file(self) -> Iterator[BinaryIO]:
        self._tmp.mkdir(parents=True, exist_ok=True)
        path = self._tmp / f"put-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            with path.open("xb") as file:
                yield file
        finally:
            path.unlink(missing_ok=True)  # Gone already where it was renamed into place.

    def _publish(self, file: BinaryIO, digest: Digest) -> None:
        path = object_path(self.root, digest)
        file.flush()
        os.fchmod(file.fileno(), _OBJECT_MODE)
        os.fsync(file.fileno())
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            fsync_dir(path.parent.parent)
        os.rename(file.name, path)
        fsync_dir(path.parent)

    def _error(self, digest: Digest, fault: Fault) -> StoreError | CorruptError:
        where = object_path(self.root, digest)
        if fault.state == "missing":
            return StoreError(
                f"object {digest} is not in the store: {where}: {fault.reason} (build it again)"
            )
        return CorruptError(
            f"object {digest} is corrupt: {where}: {fault.reason} (remove it and build again)"
        )


def _open_source(path: Path) -> io.FileIO:
    try:
        file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except OSError as error:
        raise store_error("read", path, error) from error
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise StoreError(f"cannot store {path}: not a regular file")


def _copy_hashed(source: io.FileIO, target: BinaryIO) -> Digest:
    state, size_bytes = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK_BYTES):
        state.update(chunk)
        target.write(chunk)
        size_bytes += len(chunk)
    return Digest(state.hexdigest(), size_bytes)
