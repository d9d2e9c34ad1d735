"""How a file comes into the store: whole or absent, whenever its writer dies or the power fails.

::

    tmp/put-<pid>-<16 hex>      created, and locked (flock) by its writer for as long as that lives
      write, chmod, fsync       the bytes are on the device
      read back, compare        and they are the bytes that were meant
      rename or link            the name appears, with all the bytes behind it
      fsync of the directory    the name is on the device

Every step is a plain system call on `os`, so that tests can make each of them fail, or kill the writer there.
On network file systems a rename may report ENOENT, EBUSY or ESTALE although it was done, or will be a moment
later: what counts is what lies there afterwards, so the caller looks again (`TRANSIENT_ERRORS`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

TRANSIENT_ERRORS = frozenset({errno.EBUSY, errno.ESTALE, errno.ENOENT})
"""What renaming on a network file system may report although it was done, or can be done in a moment."""

DIRECTORY_MODE = 0o775
"""Less the umask. Never writable by everybody, even where the umask allows it."""

_NO_LINKS_ERRORS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_WAITS_SECONDS = (0.01, 0.02, 0.04, 0.08)

T = TypeVar("T")


class Temporary:
    """A file being written, at `path`; made by `temporary_file`. Every method raises OSError."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def write(self, data: bytes) -> None:
        """Writes all of `data`, however many calls that takes."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def settle(self, mode: int) -> None:
        """Gives the file its mode and puts its bytes on the device."""
        os.fchmod(self._descriptor, mode)
        os.fsync(self._descriptor)
        with contextlib.suppress(OSError):  # Advice only: what is read back then comes from the device.
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def temporary_file(directory: Path) -> Iterator[Temporary]:
    """A new file under `directory`, locked by us; removed at the end unless it was renamed. Raises OSError."""
    make_directories(directory)
    path, descriptor = _create_locked(directory)
    try:
        yield Temporary(path, descriptor)
    finally:
        try:
            os.close(descriptor)
        finally:
            with contextlib.suppress(FileNotFoundError):  # Gone already where it was renamed into place.
                os.unlink(path)


def _create_locked(directory: Path) -> tuple[Path, int]:
    """Creates and locks a file; again where a sweeper found it in the moment between the two."""
    while True:
        path = directory / f"put-{os.getpid()}-{secrets.token_hex(8)}"
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


def fsync_dir(path: Path) -> None:
    """Makes the names in a directory durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(path: Path) -> None:
    """Makes `path` and what is missing above it, durably, never writable by everybody. Raises OSError."""
    if path.is_dir():
        return
    make_directories(path.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, DIRECTORY_MODE)
        fsync_dir(path.parent)


def place(temporary: Path, path: Path, is_there: Callable[[], bool]) -> None:
    """Renames `temporary` to `path`, over whatever file is there, and makes the name durable.

    `is_there` says whether `path` is what was meant, after a rename that reported a transient error.
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
    """Gives `temporary` the name `path` unless that is taken; False where it is. Raises OSError.

    It is a hard link, the one operation that never replaces. A file system without them has only a look
    before a rename: of two writers in the same moment the last one wins there.
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


def again(action: Callable[[], T], *, retry_on: frozenset[int]) -> T:
    """Runs `action`, again a few times within 0.2 s after an error in `retry_on`. Raises the last OSError."""
    for wait_seconds in _WAITS_SECONDS:
        try:
            return action()
        except OSError as error:
            if error.errno not in retry_on:
                raise
        time.sleep(wait_seconds)
    return action()
