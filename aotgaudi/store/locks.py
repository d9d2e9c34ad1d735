"""Kernel locks (``flock``): they die with their holder, and a file left behind means nothing.

::

    locks/<key>.lock    held by the builder that works on a unit
    locks/store         shared by builds, seals and pulls; held alone by a garbage collector

On a network file system the kernel passes locks on to the server (Linux does, over NFS). Without locks, two builders may
compile one unit, which is waste but no error: objects have equal bytes, and the first record stays. Collecting needs the
lock, and is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from aotgaudi.errors import StoreError, store_error
from aotgaudi.files import make_directories

_LOG = logging.getLogger(__name__)
_LOCK_NAME = re.compile(r"[0-9A-Za-z_-]{1,128}")
_NO_LOCKS_ERRORS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Locks:
    """The locks of the store at `root`. Threads exclude each other too; none is re-entrant."""

    def __init__(self, root: Path) -> None:
        self._directory = root / "locks"

    @contextlib.contextmanager
    def try_unit(self, key: str) -> Iterator[bool]:
        """Holds the lock of one unit, so that one builder compiles it; yields False at once if another holder has it.

        Nobody waits: a builder whose unit is taken works on another one and looks this one up later. A file system without
        locks gives the lock to everybody, with a warning: a unit is then compiled twice, and the first record stays.

        Raises StoreError if the lock's file cannot be made; ValueError for a key that is not a plain name.
        """
        if not _LOCK_NAME.fullmatch(key):
            raise ValueError(f"not a unit key: {key!r}")
        with self._lock(f"{key}.lock", fcntl.LOCK_EX | fcntl.LOCK_NB) as state:
            yield state is not False

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Keeps collectors out, after waiting for one that is running. Has no effect where there are no locks."""
        with self._lock("store", fcntl.LOCK_SH) as _:
            yield

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[bool]:
        """Keeps everybody else out, or yields False at once if somebody holds the lock.

        Raises StoreError where the file system has no locks.
        """
        with self._lock("store", fcntl.LOCK_EX | fcntl.LOCK_NB) as state:
            if state is None:
                raise StoreError(
                    f"{self._directory}: the file system has no locks (collect on the host that has)"
                )
            yield state

    def forget_units(self) -> None:
        """Removes the files of unit locks, held or not. Call it under `exclusive` alone."""
        for path in self._directory.glob("*.lock"):
            with contextlib.suppress(OSError):
                path.unlink()

    @contextlib.contextmanager
    def _lock(self, name: str, operation: int) -> Iterator[bool | None]:
        """Yields whether the lock is held; None where there are no locks. Raises StoreError."""
        path = self._directory / name
        try:
            make_directories(path.parent)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o664)
        except OSError as error:
            raise store_error("lock", path, error) from error
        try:
            yield _flock(descriptor, operation, path)
        finally:
            os.close(descriptor)


def _flock(descriptor: int, operation: int, path: Path) -> bool | None:
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS_ERRORS:
            raise store_error("lock", path, error) from error
        _LOG.warning("%s: the file system has no locks; units may be compiled twice, and nothing worse", path)
        return None
    return True
