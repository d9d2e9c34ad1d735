"""An object store (S3 and what else fsspec speaks) as a remote.

::

    <prefix>/objects/sha256/xx/<hex>
    <prefix>/records/xx/<key>.json
    <prefix>/bundles/<name>           pointers (remote.py)

fsspec's file systems raise whatever their libraries raise. All of that becomes RemoteError here. Errors that are not
known to be final count as transient, and are retried a bounded number of times.

Objects are read in parts, with a total time for each. fsspec reads a part whole before it gives it to us, so the store is
trusted to send no more than the range that it was asked for.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, ManifestError, MissingObjectError, RemoteError, first_line
from aotgaudi.share.http_session import DEFAULT_LIMITS, Limits, within
from aotgaudi.share.remote import (
    MAX_POINTER_BYTES,
    Download,
    Pointer,
    TransientError,
    check_name,
    load_pointer,
    without_password,
)
from aotgaudi.store.cas import find_fault
from aotgaudi.store.records import LARGEST_RECORD_BYTES

_PART_BYTES = 8 << 20
"""One request, and what one thread holds in memory."""
_FINAL_WORDS = ("NoSuchBucket", "InvalidAccessKeyId", "SignatureDoesNotMatch", "Unable to locate credentials")

T = TypeVar("T")


class ObjectStoreRemote:
    """The remote at `url`, e.g. ``s3://bucket/prefix``. See `remote.Remote`.

    Raises RemoteError where fsspec, or what it needs for this kind of URL, is missing.
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
            if offset and _is_past_end(error.__cause__):  # It is shorter than what we have of it.
                yield Download(0, iter(()))
                return
            raise
        if first is None:
            raise MissingObjectError(f"{self.label} has no object {digest}")
        if len(first) > stop - offset:  # A server without ranges has sent the whole object.
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
        """Returns the bytes of a range; None if nothing has that name."""
        read = partial(self._files.cat_file, path, start=start, end=stop)
        found = self._find(read, stop - start)
        return None if found is None else bytes(found)

    def put(self, digest: Digest, path: Path) -> None:
        """See `Remote.put`."""
        fault = find_fault(path, digest)
        if fault is not None:
            raise CorruptError(f"{path} is not object {digest}: {fault.reason}")
        self._run(partial(self._files.put_file, str(path), self._object(digest)), digest.size_bytes)

    def get_record(self, key: str) -> bytes | None:
        """See `Remote.get_record`."""
        return self._read_small(f"records/{key[:2]}/{key}.json", LARGEST_RECORD_BYTES)

    def put_record(self, key: str, data: bytes, digests: Iterable[Digest]) -> None:
        """See `Remote.put_record`."""
        path = self._path(f"records/{key[:2]}/{key}.json")
        self._run(partial(self._files.pipe_file, path, data))

    def resolve(self, name: str) -> Pointer | None:
        """See `Remote.resolve`."""
        data = self._read_small(f"bundles/{check_name(name)}", MAX_POINTER_BYTES)
        try:
            return None if data is None else load_pointer(data)
        except ManifestError as error:
            raise RemoteError(f"{self.label}: bundles/{name}: {error}") from error

    def publish(self, name: str, pointer: Pointer, digests: Iterable[Digest]) -> str:
        """See `Remote.publish`."""
        path = self._path(f"bundles/{check_name(name)}")
        self._run(partial(self._files.pipe_file, path, pointer.dumps()))
        return f"{self.label} {name}"

    def _read_small(self, name: str, max_bytes: int) -> bytes | None:
        path = self._path(name)
        found = self._find(partial(self._files.info, path))
        if found is None:
            return None
        size_bytes = found.get("size") or 0
        if size_bytes > max_bytes:
            raise RemoteError(f"{self.label}: {name} has {size_bytes} bytes, at most {max_bytes} are read")
        return self._part(path, 0, max_bytes)

    def _object(self, digest: Digest) -> str:
        return self._path(f"objects/sha256/{digest.sha256[:2]}/{digest.sha256}")

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _find(self, action: Callable[[], T], num_bytes: int = 0) -> T | None:
        """As `_run`; None if nothing has that name."""
        try:
            return self._run(action, num_bytes)
        except RemoteError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def _run(self, action: Callable[[], T], num_bytes: int = 0) -> T:
        """Runs `action`, which transfers so many bytes, within their time. Turns every error into RemoteError."""
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
    """Whether a range was refused since the file ends before it: aiohttp's error, or s3fs's."""
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
