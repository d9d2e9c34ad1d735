"""A remote: a place where builders share objects and records, in a directory or in anything that fsspec opens.

::

    objects/sha256/xx/<hex>   as in a store
    records/xx/<key>.json     as in a store
    tmp/                      unfinished files of a directory

A directory is written like a store, each file whole or not at all. Everything else goes through fsspec, which reads
credentials and endpoints from its usual environment. Writers upload objects before the records that name them.

Nothing that a remote says is believed: `Remote.chunks` only bounds an object, and `ObjectStore.put_chunks` hashes it.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, Union
from urllib.parse import unquote, urlsplit

from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, MissingObjectError, RemoteError, SpecError, first_line
from aotgaudi.files import open_descriptor, place, temporary_file
from aotgaudi.machine import LateError, within
from aotgaudi.store.cas import object_path
from aotgaudi.store.records import LARGEST_RECORD_BYTES, RecordStore

ANSWER_SECONDS = 30.0
"""How long an answer may take, and one second more for each 32 KiB that it carries."""

_LEAST_BYTES_PER_SECOND = 32 << 10
_RETRY_SECONDS = 0.5
_PART_BYTES = 4 << 20
"""The size of one request, and of what one thread holds in memory."""

_MODE = 0o444
_READ_ONLY = frozenset({"http", "https"})
_EXTRAS = {"s3": "s3", "s3a": "s3", "http": "http", "https": "http"}
_SCHEME = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://")
_USER_INFO = re.compile(r"://[^/@\s]*@")
_EXPECTED = "a directory (./DIR, /DIR), or a URL that fsspec opens, such as s3://BUCKET/PREFIX"

T = TypeVar("T")
Source = Union[bytes, Path]


class NoAnswerError(RemoteError):
    """The remote has not answered in time."""


def without_password(url: str) -> str:
    """Returns a URL without user and password, for messages."""
    return _USER_INFO.sub("://", url)


def is_read_only(url: str) -> bool:
    """Returns whether nothing can be uploaded to a URL of this kind."""
    return _scheme(url) in _READ_ONLY


class Remote:
    """The remote at `url`. Thread-safe. An answer may take `seconds`; a call that fails is repeated once.

    Methods raise RemoteError (NoAnswerError, if nothing came in time). The constructor sends nothing. It raises SpecError if
    `url` names no remote, or if a package that it needs is not installed.
    """

    def __init__(self, url: str, *, seconds: float = ANSWER_SECONDS) -> None:
        self.label = without_password(url)
        self._seconds = seconds
        self._files = _open(url)

    def get_record(self, key: str) -> bytes | None:
        """Returns the bytes recorded for `key`, unverified; None if there are none. Of too many, returns the first."""
        data = self._ask(partial(self._files.read, _record(key), 0, LARGEST_RECORD_BYTES + 1))
        return None if data is None else data[: LARGEST_RECORD_BYTES + 1]

    def put_record(self, key: str, data: bytes) -> None:
        """Records `data` for `key`, in place of any earlier record. The objects that it names must be there."""
        self._ask(partial(self._files.write, _record(key), data), len(data))

    def has(self, digest: Digest) -> bool:
        """Returns whether a file of this name and size is there. Does not read it."""
        return self._ask(partial(self._files.size, _object(digest))) == digest.size_bytes

    def chunks(self, digest: Digest) -> Iterator[bytes]:
        """Yields the bytes of an object, unverified, but no more than it has. Raises MissingObjectError, CorruptError."""
        name, offset = _object(digest), 0
        while offset < digest.size_bytes:
            stop = min(offset + _PART_BYTES, digest.size_bytes)
            part = self._ask(partial(self._files.read, name, offset, stop), stop - offset)
            if part is None:
                raise MissingObjectError(f"{self.label} has no object {digest}")
            if not part or (len(part) > stop - offset and (offset or len(part) != digest.size_bytes)):
                raise CorruptError(f"{self.label}: object {digest} has another size")
            yield part
            offset += len(part)  # A server without ranges has sent the whole object.

    def put(self, digest: Digest, path: Path) -> None:
        """Uploads the file at `path` as the object `digest`, which it must be."""
        self._ask(partial(self._files.write, _object(digest), path), digest.size_bytes)

    def _ask(self, action: Callable[[], T], num_bytes: int = 0) -> T:
        seconds = self._seconds + num_bytes / _LEAST_BYTES_PER_SECOND
        for is_last in (False, True):
            try:
                return within(seconds, action)
            except LateError as error:  # Limits of libraries apply to single reads, which may trickle.
                raise NoAnswerError(f"{self.label}: has not answered in {seconds:.0f} s") from error
            except Exception as error:
                if is_last or isinstance(error, PermissionError):
                    text = f"{type(error).__name__}: {without_password(first_line(error))[:200]}"
                    raise RemoteError(f"{self.label}: {text}") from error
            time.sleep(_RETRY_SECONDS)
        raise AssertionError


class _Directory:
    """The files below a directory, which is created with the first of them. Raises OSError."""

    def __init__(self, root: Path) -> None:
        self._root = root.expanduser().absolute()

    def read(self, name: str, start: int, stop: int) -> bytes | None:
        with suppress(FileNotFoundError, NotADirectoryError):
            descriptor = open_descriptor(self._root / name)
            try:
                return os.pread(descriptor, stop - start, start)
            finally:
                os.close(descriptor)
        return None

    def size(self, name: str) -> int | None:
        with suppress(FileNotFoundError, NotADirectoryError):
            return os.stat(self._root / name).st_size
        return None

    def write(self, name: str, source: Source) -> None:
        path = self._root / name
        with temporary_file(self._root / "tmp") as file:
            for chunk in _chunks(source):
                file.write(chunk)
            file.settle(_MODE)
            place(file.path, path, path.exists)


class _FileSystem:
    """The files below `prefix` in a file system of fsspec. Raises whatever that raises.

    A server without ranges may give the whole file, of which a part was asked for.
    """

    def __init__(self, files: Any, prefix: str) -> None:
        self._files, self._prefix = files, prefix.rstrip("/")

    def read(self, name: str, start: int, stop: int) -> bytes | None:
        try:
            return bytes(self._files.cat_file(f"{self._prefix}/{name}", start=start, end=stop))
        except FileNotFoundError:
            return None
        except Exception as error:
            if getattr(error, "status", None) == 416 or getattr(error, "errno", None) == errno.EINVAL:
                return b""  # The file ends before the range: so say aiohttp and s3fs.
            raise

    def size(self, name: str) -> int | None:
        size: int | None = None
        with suppress(FileNotFoundError):
            size = self._files.info(f"{self._prefix}/{name}").get("size")
        return size

    def write(self, name: str, source: Source) -> None:
        path = f"{self._prefix}/{name}"
        if not self._files.async_impl:  # An object store, which has no directories, is asynchronous.
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        if isinstance(source, bytes):
            self._files.pipe_file(path, source)
        else:
            self._files.put_file(str(source), path)


_Files = Union[_Directory, _FileSystem]


def _open(url: str) -> _Files:
    scheme = _scheme(url)
    if scheme is None:
        if url.startswith(("/", "./", "../", "~/")) or url in (".", ".."):
            return _Directory(Path(url))
        hint = f"a directory is ./{url}" if re.fullmatch(r"[\w./-]+", url) else _EXPECTED
        raise SpecError("--remote", f"{url!r:.200} is not a remote", hint)
    if scheme == "file":
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise SpecError("--remote", f"{url!r:.200} names another machine, or no directory", "file:///DIR")
        return _Directory(Path(unquote(parts.path)))
    return _open_file_system(url, scheme)


def _open_file_system(url: str, scheme: str) -> _Files:
    import fsspec

    shown = without_password(url)[:200]
    try:
        files, prefix = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        remedy = f"pip install 'aotgaudi[{extra}]'" if extra else "install the package that it names"
        raise SpecError("--remote", f"{shown}: {first_line(error)}", remedy) from error
    except Exception as error:  # Of a library that found no account, or no such scheme.
        raise SpecError("--remote", f"{shown}: {first_line(error)}", _EXPECTED) from error
    return _FileSystem(files, prefix)


def _scheme(url: str) -> str | None:
    found = _SCHEME.match(url)
    return found["scheme"] if found else None


def _object(digest: Digest) -> str:
    return object_path(Path(), digest).as_posix()


def _record(key: str) -> str:
    return RecordStore(Path()).path(key).as_posix()


def _chunks(source: Source) -> Iterator[bytes]:
    if isinstance(source, bytes):
        yield source
        return
    with source.open("rb") as file:
        while chunk := file.read(1 << 20):
            yield chunk
