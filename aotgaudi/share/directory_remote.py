"""A directory as a remote: on a shared file system, a mounted volume, a memory stick.

::

    objects/sha256/xx/<hex>   as in a store
    records/xx/<key>.json     as in a store
    bundles/<name>            pointers (remote.py)
    tmp/                      what is being written

Objects and records lie as they do in a store, and are written in the same way: whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, ManifestError, MissingObjectError, RemoteError, store_error
from aotgaudi.files import (
    NotRegularError,
    Temporary,
    make_directories,
    open_descriptor,
    place,
    temporary_file,
    write_atomic,
)
from aotgaudi.share.remote import MAX_POINTER_BYTES, Download, Pointer, check_name, load_pointer
from aotgaudi.store.cas import ABSENT_ERRORS, Fault, ObjectStore, object_path, read_bounded
from aotgaudi.store.records import LARGEST_RECORD_BYTES, RecordStore

_CHUNK_BYTES = 1 << 20
_RECORD_MODE = 0o444


class DirectoryRemote:
    """The remote at `root`, which is made when something is first put there. See `remote.Remote`."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.label = str(root)
        self._objects = ObjectStore(self.root)
        self._records = RecordStore(self.root)

    def has(self, digest: Digest) -> bool:
        """See `Remote.has`."""
        return self._objects.has(digest)

    @contextlib.contextmanager
    def read(self, digest: Digest, offset: int = 0) -> Iterator[Download]:
        """See `Remote.read`."""
        path = object_path(self.root, digest)
        try:
            descriptor = open_descriptor(path)
        except NotRegularError as error:
            raise MissingObjectError(f"{self.label}: {path} is {error.strerror}") from error
        except OSError as error:
            if error.errno in ABSENT_ERRORS:
                raise MissingObjectError(f"{self.label} has no object {digest}") from error
            raise _refusal("read", path, error) from error
        try:
            os.lseek(descriptor, offset, os.SEEK_SET)
            yield Download(offset, _chunks(descriptor, path))
        finally:
            os.close(descriptor)

    def put(self, digest: Digest, path: Path) -> None:
        """See `Remote.put`."""
        found = self._objects.put_file(path)
        if found != digest:
            raise CorruptError(f"{path} is not object {digest}: it has {found}")

    def get_record(self, key: str) -> bytes | None:
        """See `Remote.get_record`."""
        return self._read_small(self._records.path(key), LARGEST_RECORD_BYTES)

    def put_record(self, key: str, data: bytes, digests: Iterable[Digest]) -> None:
        """See `Remote.put_record`."""
        path = self._records.path(key)
        try:
            with temporary_file(self.root / "tmp") as file:
                _write_settled(file, data)
                place(file.path, path, path.exists)
        except OSError as error:
            raise _refusal("write", path, error, len(data)) from error

    def resolve(self, name: str) -> Pointer | None:
        """See `Remote.resolve`."""
        path = self.root / "bundles" / check_name(name)
        data = self._read_small(path, MAX_POINTER_BYTES)
        try:
            return None if data is None else load_pointer(data)
        except ManifestError as error:
            raise RemoteError(f"{path}: {error}") from error

    def publish(self, name: str, pointer: Pointer, digests: Iterable[Digest]) -> str:
        """See `Remote.publish`."""
        path = self.root / "bundles" / check_name(name)
        try:
            make_directories(path.parent)
        except OSError as error:
            raise _refusal("write", path, error) from error
        write_atomic(path, pointer.dumps())
        return f"{self.label} {name}"

    def _read_small(self, path: Path, max_bytes: int) -> bytes | None:
        data = read_bounded(path, max_bytes)
        if not isinstance(data, Fault):
            return data
        if data.state == "missing":
            return None
        raise RemoteError(f"{path}: {data.reason}")


def _chunks(descriptor: int, path: Path) -> Iterator[bytes]:
    try:
        while chunk := os.read(descriptor, _CHUNK_BYTES):
            yield chunk
    except OSError as error:
        raise _refusal("read", path, error) from error


def _write_settled(file: Temporary, data: bytes) -> None:
    file.write(data)
    file.settle(_RECORD_MODE)


def _refusal(doing: str, path: Path, error: OSError, needed_bytes: int = 0) -> RemoteError:
    return RemoteError(str(store_error(doing, path, error, needed_bytes=needed_bytes)))
