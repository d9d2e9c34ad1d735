"""Receiving an object: into a partial file that a later run continues, verified before it gets its name.

What was received is hashed as it is written, and never more is written than the digest allows. A partial file that
is found is hashed first and then continued; when the whole is not what the digest says, it is begun anew once,
for what was found may have been of another transfer. A partial file is locked by whoever fills it: another process
waits, and finds the object done.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, StoreError, store_error
from aotgaudi.files import make_directories, place
from aotgaudi.share.remote import Remote, TransientError
from aotgaudi.share.retry import Retry
from aotgaudi.store.cas import find_fault

_CHUNK_BYTES = 1 << 20
_MODE = 0o444
_PROGRESS_BYTES = 1 << 20
"""A connection that brought this much before it broke is not counted as a failed attempt."""

Fill = Callable[["Partial"], None]


class Partial:
    """A file being received. Methods raise OSError."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Hashes what is there already."""
        self.path = path
        self._descriptor = descriptor
        self._state, self.size_bytes = hashlib.sha256(), 0
        while chunk := os.read(descriptor, _CHUNK_BYTES):
            self._state.update(chunk)
            self.size_bytes += len(chunk)

    def write(self, chunk: bytes) -> None:
        """Appends all of `chunk`."""
        view = memoryview(chunk)
        while view:
            view = view[os.write(self._descriptor, view) :]
        self._state.update(chunk)
        self.size_bytes += len(chunk)

    def restart(self) -> None:
        """Forgets all that was received."""
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self._state, self.size_bytes = hashlib.sha256(), 0

    def is_whole(self, digest: Digest) -> bool:
        """Whether what was received is what `digest` names."""
        return Digest(self._state.hexdigest(), self.size_bytes) == digest

    def set_mode(self, mode: int) -> None:
        """Gives the file its mode."""
        os.fchmod(self._descriptor, mode)

    def sync(self) -> None:
        """Puts its bytes on the device."""
        os.fsync(self._descriptor)


def receive(digest: Digest, partial: Path, path: Path, fill: Fill, *, is_staged: bool = False) -> bool:
    """Has `fill` complete the file `partial`, and renames it to `path`.

    Returns False if there was nothing to do because the object is already there, intact. A file that `fill` leaves
    unfinished stays, to be continued. On return the object is durable and was read back; with `is_staged` the caller
    does that, for all files at once. Raises StoreError, and what `fill` raises.
    """
    if find_fault(path, digest) is None:
        return False
    try:
        make_directories(partial.parent)
        with _locked(partial) as file:
            if find_fault(path, digest) is None:  # Another process was quicker.
                partial.unlink()
                return False
            require_room(partial.parent, digest.size_bytes - file.size_bytes)
            fill(file)
            file.set_mode(_MODE)
            if is_staged:
                path.parent.mkdir(parents=True, exist_ok=True)
                os.rename(partial, path)
                return True
            file.sync()
            place(partial, path, lambda: find_fault(path, digest) is None)
    except OSError as error:
        raise store_error("receive an object to", path, error, needed_bytes=digest.size_bytes) from error
    _verify_written(path, digest)
    return True


def require_room(directory: Path, num_bytes: int) -> None:
    """Raises StoreError unless `num_bytes` more fit below `directory`, which need not be there yet.

    What a remote claims is compared with the disk before a byte is asked for, not when the disk is full.
    """
    while not directory.exists():
        directory = directory.parent
    try:
        status = os.statvfs(directory)
    except OSError as error:
        raise store_error("look at", directory, error) from error
    free_bytes = status.f_bavail * status.f_frsize
    if num_bytes > free_bytes:
        raise StoreError(
            f"there is no room for {num_bytes} bytes at {directory}: {free_bytes} are free (free space there, or"
            " use another place; if that is far more than the bundle should have, do not trust the remote)"
        )


def fill_from(
    remote: Remote, digest: Digest, partial: Partial, retry: Retry, advance: Callable[[int], None]
) -> None:
    """Completes `partial` from `remote`, continuing where an attempt broke off.

    `advance` is told how many bytes came, and, with a negative number, how many were dropped again.
    Raises CorruptError where the remote's bytes are others, RemoteError, and MissingObjectError.
    """
    is_continued, may_restart, attempt = partial.size_bytes > 0, True, 0
    began = retry.clock()
    is_ended = partial.size_bytes >= digest.size_bytes
    while not partial.is_whole(digest):
        if is_ended:
            _drop(partial, advance)
            if not (is_continued and may_restart):
                raise CorruptError(f"{remote.label}: object {digest}: its bytes are not what its digest says")
            is_continued = may_restart = False
        before = partial.size_bytes
        try:
            _receive_rest(remote, digest, partial, advance)
            is_ended = True
        except TransientError as error:
            is_ended, is_continued = False, partial.size_bytes > 0
            if partial.size_bytes - before >= _PROGRESS_BYTES:
                attempt, began = -1, retry.clock()
            attempt += 1
            if attempt >= retry.num_attempts or retry.is_over(began):
                raise
            retry.wait(max(attempt - 1, 0), error)


def _receive_rest(remote: Remote, digest: Digest, partial: Partial, advance: Callable[[int], None]) -> None:
    """One attempt, to the end of what the remote has, at most to a byte too much. Raises TransientError."""
    with remote.read(digest, partial.size_bytes) as download:
        if download.offset != partial.size_bytes:
            _drop(partial, advance)
        if download.offset not in (0, partial.size_bytes):
            raise TransientError(f"{remote.label}: object {digest}: comes from byte {download.offset} on")
        for chunk in download.chunks:
            part = chunk[: digest.size_bytes - partial.size_bytes + 1]
            partial.write(part)
            advance(len(part))
            if partial.size_bytes > digest.size_bytes:
                return


def _drop(partial: Partial, advance: Callable[[int], None]) -> None:
    advance(-partial.size_bytes)
    partial.restart()


def _verify_written(path: Path, digest: Digest) -> None:
    fault = find_fault(path, digest)
    if fault is not None:
        raise StoreError(f"what was written to {path} reads back differently: {fault.reason}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[Partial]:
    """Opens or creates the file at `path`, waits until it is ours, and yields it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        descriptor = os.open(path, flags, 0o600)
        try:
            with contextlib.suppress(OSError):  # A file system without locks: two may fill it, one verifies.
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(path, descriptor):
                yield Partial(path, descriptor)
                return
        finally:
            os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the name still means the open file: its former owner may have renamed it, being done."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
