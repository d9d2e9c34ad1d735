"""Directories and object stores as remotes, with one layout.

::

    objects/sha256/xx/<hex>   as in a store
    records/xx/<key>.json     as in a store
    tmp/                      unfinished files of a directory

A directory (on a shared file system, a mounted volume, a memory stick) is written like a store, each file whole or not at
all.

An object store is S3 or any other that fsspec supports. fsspec's file systems raise the errors of their libraries, which all
become RemoteError here. Errors that are not known to be final count as transient, and are retried a limited number of times.
Objects are read in parts, each with a total time limit. fsspec reads a part whole before it returns it, so we trust the
store to send no more than the requested range.
"""

from __future__ import annotations

import contextlib
import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from aotgaudi.digest import Digest
from aotgaudi.errors import (
    CorruptError,
    MissingObjectError,
    RemoteError,
    first_line,
    store_error,
)
from aotgaudi.files import (
    NotRegularError,
    open_descriptor,
    place,
    temporary_file,
)
from aotgaudi.share.http_session import DEFAULT_LIMITS, Limits, within
from aotgaudi.share.remote import Download, TransientError, without_password
from aotgaudi.store.cas import ABSENT_ERRORS, Fault, ObjectStore, find_fault, object_path, read_bounded
from aotgaudi.store.records import LARGEST_RECORD_BYTES, RecordStore

_CHUNK_BYTES = 1 << 20
_PART_BYTES = 8 << 20
"""The size of one request to an object store, and of what one thread holds in memory."""
_RECORD_MODE = 0o444
_FINAL_WORDS = ("NoSuchBucket", "InvalidAccessKeyId", "SignatureDoesNotMatch", "Unable to locate credentials")

T = TypeVar("T")


class _FileRemote(ABC):
    """The common part of both: the names and contents of small files."""

    label: str

    @abstractmethod
    def _read_small(self, name: str, max_bytes: int) -> bytes | None:
        """Returns the bytes of a file; None if there is none. Raises RemoteError, also if it exceeds `max_bytes`."""

    @abstractmethod
    def _write_small(self, name: str, data: bytes) -> None:
        """Writes a file, whole or not at all."""

    def get_record(self, key: str) -> bytes | None:
        """See `Remote.get_record`."""
        return self._read_small(_record(key), LARGEST_RECORD_BYTES)

    def put_record(self, key: str, data: bytes, digests: Iterable[Digest]) -> None:
        """See `Remote.put_record`."""
        self._write_small(_record(key), data)


def _record(key: str) -> str:
    return RecordStore(Path()).path(key).as_posix()


class DirectoryRemote(_FileRemote):
    """The remote at `root`, which is created with the first upload. See `remote.Remote`."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.label = str(root)
        self._objects = ObjectStore(self.root)

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

    def _read_small(self, name: str, max_bytes: int) -> bytes | None:
        data = read_bounded(self.root / name, max_bytes)
        if not isinstance(data, Fault):
            return data
        if data.state == "missing":
            return None
        raise RemoteError(f"{self.root / name}: {data.reason}")

    def _write_small(self, name: str, data: bytes) -> None:
        path = self.root / name
        try:
            with temporary_file(self.root / "tmp") as file:
                file.write(data)
                file.settle(_RECORD_MODE)
                place(file.path, path, path.exists)
        except OSError as error:
            raise _refusal("write", path, error, len(data)) from error


def _chunks(descriptor: int, path: Path) -> Iterator[bytes]:
    try:
        while chunk := os.read(descriptor, _CHUNK_BYTES):
            yield chunk
    except OSError as error:
        raise _refusal("read", path, error) from error


def _refusal(doing: str, path: Path, error: OSError, needed_bytes: int = 0) -> RemoteError:
    return RemoteError(str(store_error(doing, path, error, needed_bytes=needed_bytes)))


class ObjectStoreRemote(_FileRemote):
    """The remote at `url`, e.g. ``s3://bucket/prefix``. See `remote.Remote`.

    Raises RemoteError if fsspec, or a package that it needs for this kind of URL, is missing.
    """

    def __init__(self, url: str, *, limits: Limits = DEFAULT_LIMITS) -> None:
        self.label = without_password(url)
        self._limits = limits
        self._files, self._prefix = _open_file_system(url, self.label)

    def has(self, digest: Digest) -> bool:
        """See `Remote.has`."""
        found = self._find(partial(self._files.info, self._object(digest)))
        return found is not None and found.get("type") == "file" and found.get("size") == digest.size_bytes

    @contextlib.contextmanager
    def read(self, digest: Digest, offset: int = 0) -> Iterator[Download]:
        """See `Remote.read`."""
        path = self._object(digest)
        stop = max(min(offset + _PART_BYTES, digest.size_bytes), offset + 1)
        try:
            first = self._part(path, offset, stop)
        except RemoteError as error:
            if offset and _is_past_end(error.__cause__):  # The object is shorter than what we already have.
                yield Download(0, iter(()))
                return
            raise
        if first is None:
            raise MissingObjectError(f"{self.label} has no object {digest}")
        if len(first) > stop - offset:  # A server without ranges sends the whole object.
            yield Download(0, iter((first[: digest.size_bytes],)))
        else:
            yield Download(offset, self._parts(digest, first, offset))

    def _parts(self, digest: Digest, first: bytes, offset: int) -> Iterator[bytes]:
        part: bytes | None = first
        while part:
            yield part
            offset += len(part)
            if offset >= digest.size_bytes:
                return
            part = self._part(self._object(digest), offset, min(offset + _PART_BYTES, digest.size_bytes))
            if part is None:
                raise MissingObjectError(f"{self.label} has no object {digest}")

    def _part(self, path: str, start: int, stop: int) -> bytes | None:
        """Returns the bytes of a range; None if there is no such file."""
        read = partial(self._files.cat_file, path, start=start, end=stop)
        found = self._find(read, stop - start)
        return None if found is None else bytes(found)

    def put(self, digest: Digest, path: Path) -> None:
        """See `Remote.put`."""
        fault = find_fault(path, digest)
        if fault is not None:
            raise CorruptError(f"{path} is not object {digest}: {fault.reason}")
        self._run(partial(self._files.put_file, str(path), self._object(digest)), digest.size_bytes)

    def _read_small(self, name: str, max_bytes: int) -> bytes | None:
        path = self._path(name)
        found = self._find(partial(self._files.info, path))
        if found is None:
            return None
        size_bytes = found.get("size") or 0
        if size_bytes > max_bytes:
            raise RemoteError(f"{self.label}: {name} has {size_bytes} bytes, at most {max_bytes} are read")
        return self._part(path, 0, max_bytes)

    def _write_small(self, name: str, data: bytes) -> None:
        self._run(partial(self._files.pipe_file, self._path(name), data))

    def _object(self, digest: Digest) -> str:
        return self._path(f"objects/sha256/{digest.sha256[:2]}/{digest.sha256}")

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _find(self, action: Callable[[], T], num_bytes: int = 0) -> T | None:
        """Runs `action` as `_run` does, but returns None if there is no such file."""
        try:
            return self._run(action, num_bytes)
        except RemoteError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def _run(self, action: Callable[[], T], num_bytes: int = 0) -> T:
        """Runs `action`, which transfers `num_bytes`, within the time for them. Turns every error into RemoteError."""
        try:
            return within(self._limits.seconds_for(num_bytes), action)
        except Exception as error:
            raise self._refusal(error) from error

    def _refusal(self, error: Exception) -> RemoteError:
        lines = str(error).splitlines() or [""]
        text = f"{self.label}: {type(error).__name__}: {without_password(lines[0])[:200]}"
        is_final = isinstance(error, (FileNotFoundError, PermissionError, ImportError)) or any(
            word in text for word in _FINAL_WORDS
        )
        return RemoteError(text) if is_final else TransientError(text)


def _is_past_end(error: BaseException | None) -> bool:
    """Returns whether `error` (aiohttp's or s3fs's) says that the file ends before the range."""
    return getattr(error, "status", None) == 416 or getattr(error, "errno", None) == errno.EINVAL


def _open_file_system(url: str, label: str) -> tuple[Any, str]:
    try:
        import fsspec

        files, prefix = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        remedy = "pip install 'aotgaudi[s3]'" if url.startswith("s3:") else "install what fsspec needs for it"
        raise RemoteError(f"{label}: {first_line(error)} ({remedy})") from error
    except ValueError as error:
        raise RemoteError(f"{label}: {error}") from error
    return files, prefix.rstrip("/")
