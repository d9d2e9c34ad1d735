"""Safe reading and writing of files.

Writing: we write a temporary file in the destination's folder, flush it and rename it. Readers see the old bytes or the
new ones, never a mixture, even after a power cut.

Reading other people's files: only `open_descriptor` opens them. It opens regular files only and never waits: a FIFO does
not block it, and a device is not touched. `read_regular` also bounds the size, so a sparse file of terabytes costs one
``fstat``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from aotgaudi import linux
from aotgaudi.errors import SpecError, StoreError

TRANSIENT_ERRORS = frozenset({errno.EBUSY, errno.ESTALE, errno.ENOENT})
"""What a rename on a network file system may report although it succeeded, or would succeed a moment later."""

DIRECTORY_MODE = 0o775
"""The umask is subtracted. Even with a permissive umask, directories are never writable by everybody."""

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_EXCHANGE_ERRORS = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})

_NO_LINKS_ERRORS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_WAITS_SECONDS = (0.01, 0.02, 0.04, 0.08)

T = TypeVar("T")


class Temporary:
    """A file being written, at `path`, made by `temporary_file`. Every method raises OSError."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def write(self, data: bytes) -> None:
        """Writes all of `data`, in several system calls if needed."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def settle(self, mode: int) -> None:
        """Sets the file's mode and flushes its bytes to the device."""
        os.fchmod(self._descriptor, mode)
        os.fsync(self._descriptor)
        with contextlib.suppress(OSError):  # Advice only: later reads then come from the device.
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Ends writing and releases the lock. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def write_atomic(path: Path, data: bytes | Iterable[bytes], mode: int = 0o644) -> None:
    """Replaces `path` atomically with a file that holds `data` (whole or in pieces) and has exactly the permissions `mode`.

    The unfinished file lies in the same folder. The last of several concurrent writers wins. A failed write leaves `path`
    unchanged and no temporary file behind.

    Raises:
        StoreError: the file cannot be written (no such folder, no permission, no space).
    """
    try:
        with _locked_file(path.parent, f".{path.name}.") as file:
            for piece in [data] if isinstance(data, bytes) else data:
                file.write(piece)
            file.settle(mode)
            file.close()  # A file that is open for writing cannot be executed.
            os.replace(file.path, path)
        fsync_dir(path.parent)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def temporary_file(directory: Path) -> Iterator[Temporary]:
    """Yields a new file named ``put-<pid>-<16 hex>`` under `directory`, which is created if missing.

    We hold the file's lock. At the end the file is removed, unless it was renamed. Raises OSError.
    """
    make_directories(directory)
    with _locked_file(directory, f"put-{os.getpid()}-") as file:
        yield file


@contextlib.contextmanager
def _locked_file(directory: Path, prefix: str) -> Iterator[Temporary]:
    file = Temporary(*_create_locked(directory, prefix))
    try:
        yield file
    finally:
        try:
            file.close()
        finally:
            with contextlib.suppress(FileNotFoundError):  # It is gone already if it was renamed into place.
                os.unlink(file.path)


def _create_locked(directory: Path, prefix: str) -> tuple[Path, int]:
    """Creates and locks a file. Starts over if a sweeper found it between the two steps."""
    while True:
        path = directory / f"{prefix}{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with contextlib.suppress(OSError):  # Without locks the sweep goes by age.
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return path, descriptor
        except BaseException:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        os.close(descriptor)


def make_locked_directory(parent: Path, prefix: str) -> tuple[Path, int]:
    """Makes a directory that only we can enter. Returns it and a descriptor, which holds its lock until it is closed.

    Starts over if a sweeper found the directory before it was locked. Raises OSError.
    """
    while True:
        path = parent / f"{prefix}{secrets.token_hex(8)}"
        os.mkdir(path, 0o700)
        try:
            descriptor = os.open(path, _DIRECTORY_FLAGS)
        except FileNotFoundError:
            continue
        except BaseException:
            path.rmdir()
            raise
        if _lock(descriptor) is not False and path.exists():
            return path, descriptor
        os.close(descriptor)


@contextlib.contextmanager
def lock_directory(path: Path) -> Iterator[bool | None]:
    """Holds a directory's lock (flock) during the block and yields True, or yields False at once if another holder has it.

    Yields None on a file system without locks. Raises OSError.
    """
    descriptor = os.open(path, _DIRECTORY_FLAGS)
    try:
        yield _lock(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def fsync_dir(path: Path) -> None:
    """Makes the names in a directory durable. Raises OSError."""
    fsync(path, os.O_DIRECTORY)


def fsync(path: Path, flags: int = os.O_NOFOLLOW) -> None:
    """Makes a file durable, which is opened for reading with `flags`. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(path: Path) -> None:
    """Creates `path` and its missing parents, durably, never writable by everybody. Raises OSError."""
    if path.is_dir():
        return
    make_directories(path.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, DIRECTORY_MODE)
        fsync_dir(path.parent)


def own_directory(path: Path) -> bool:
    """Makes a directory that only we can enter, or takes one of ours. Returns False if `path` is anything else.

    It is looked at through its descriptor. So if others may write to the directory above, they cannot put another there
    between the look and the change of its mode. Raises OSError.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    try:
        descriptor = os.open(path, _DIRECTORY_FLAGS)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP, errno.EACCES):
            return False
        raise
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            return False
        os.fchmod(descriptor, 0o700)
        return True
    finally:
        os.close(descriptor)


def place(temporary: Path, path: Path, is_there: Callable[[], bool]) -> None:
    """Renames `temporary` to `path`, replacing any file there, and makes the name durable.

    After a rename that reported a transient error, `is_there` says whether `path` is the intended file.
    Raises OSError.
    """

    def rename() -> None:
        try:
            os.rename(temporary, path)
        except OSError as error:
            if error.errno not in TRANSIENT_ERRORS or not is_there():
                raise

    make_directories(path.parent)
    again(rename, retry_on=TRANSIENT_ERRORS)
    fsync_dir(path.parent)


def place_first(temporary: Path, path: Path) -> bool:
    """Gives `temporary` the name `path`, or returns False if that name is taken. Raises OSError.

    It makes a hard link, the only operation that never replaces a file. On a file system without hard links it can only look
    before it renames, so the last of two simultaneous writers wins there.
    """
    make_directories(path.parent)
    try:
        os.link(temporary, path, follow_symlinks=False)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS_ERRORS:
            raise
        if os.path.lexists(path):
            return False
        os.rename(temporary, path)
    fsync_dir(path.parent)
    return True


def exchange_names(one: Path, other: Path) -> bool:
    """Exchanges two names in one step (renameat2 with RENAME_EXCHANGE). Returns False if the kernel or file system cannot.

    Raises OSError.
    """
    try:
        linux.exchange_names(one, other)
    except OSError as error:
        if error.errno not in _NO_EXCHANGE_ERRORS:
            raise
        return False
    return True


def again(action: Callable[[], T], *, retry_on: frozenset[int]) -> T:
    """Runs `action`, and retries it for up to 0.2 s after errors in `retry_on`. Raises the last OSError."""
    for wait_seconds in _WAITS_SECONDS:
        try:
            return action()
        except OSError as error:
            if error.errno not in retry_on:
                raise
        time.sleep(wait_seconds)
    return action()


Examine = Callable[[Path, os.stat_result], None]
"""Checks an open regular file before it is read, and raises if it must not be read."""

MAX_DOCUMENT_BYTES = 256 << 20
"""The largest document of ours that we read: a manifest, a receipt, an index."""

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISLNK, "a symbolic link"),
)
_KINDS_BY_ERROR = {
    errno.ELOOP: "a symbolic link",
    errno.ENXIO: "a socket or a device",
    errno.ENODEV: "a device",
}
"""What ``open`` refuses before we can examine it."""


class NotRegularError(OSError):
    """A path does not name a regular file. `kind` says what it names ("a FIFO")."""

    def __init__(self, path: Path | str, kind: str) -> None:
        super().__init__(errno.EINVAL, f"not a regular file: {kind}", str(path))
        self.kind = kind


def accept_any(path: Path, status: os.stat_result) -> None:
    """Accepts every file."""


def open_descriptor(path: Path | str, *, follow: bool = False, examine: Examine = accept_any) -> int:
    """Opens a regular file for reading, without ever waiting, and returns its descriptor. The caller closes it.

    A symbolic link at `path` is refused unless `follow`. Links in the directories above it are always followed.

    Raises NotRegularError if `path` names something else, OSError if it cannot be opened, and whatever `examine` raises.
    """
    try:
        descriptor = os.open(path, _FLAGS | (0 if follow else os.O_NOFOLLOW))
    except OSError as error:
        if error.errno in _KINDS_BY_ERROR and not (follow and error.errno == errno.ELOOP):
            raise NotRegularError(path, _KINDS_BY_ERROR[error.errno]) from error
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "a device")
            raise NotRegularError(path, kind)
        examine(Path(path), status)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def open_regular(path: Path, examine: Examine = accept_any) -> Iterator[io.FileIO]:
    """Opens a regular file for reading, following links.

    Raises:
        SpecError: `path` names something else, or cannot be opened.
        FileNotFoundError: there is no such file.
    """
    try:
        descriptor = open_descriptor(path, follow=True, examine=examine)
    except FileNotFoundError:
        raise
    except NotRegularError as error:
        raise SpecError(str(path), f"cannot be read: it is {error.kind}", "a regular file") from error
    except (OSError, ValueError) as error:  # A ValueError means a path with a zero byte.
        raise SpecError(str(path), f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    with io.FileIO(descriptor, "rb") as file:
        yield file


def read_regular(path: Path, max_bytes: int, examine: Examine = accept_any) -> bytes:
    """Returns the bytes of a regular file. Raises like `open_regular`, and SpecError for more than `max_bytes`."""
    with open_regular(path, examine) as file:
        return read_whole(file, path, max_bytes)


def read_whole(file: io.FileIO, path: Path, max_bytes: int) -> bytes:
    """Returns the bytes of an open regular file. Raises SpecError for more than `max_bytes`, or if they cannot be read."""
    size_bytes = os.fstat(file.fileno()).st_size
    data = b"" if size_bytes > max_bytes else _read(file, path, max_bytes + 1)
    if max(size_bytes, len(data)) > max_bytes:
        raise SpecError(str(path), f"has {max(size_bytes, len(data))} bytes, at most {max_bytes} are read")
    return data


def _read(file: io.FileIO, path: Path, max_bytes: int) -> bytes:
    try:
        return io.BufferedReader(file).read(max_bytes)
    except OSError as error:
        raise SpecError(str(path), f"cannot be read: {error.strerror}") from error
