"""Reading a file that is named by its digest: is it intact, and what is in it.

Only regular files are ever opened for reading: a symbolic link, a FIFO, a device or a directory at an object's path
is a fault, and cannot make the reader follow, block or act. The size is compared first, so that a truncated file costs
one ``fstat``; never more than ``size + 1`` bytes are read.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, store_error
from aotgaudi.files import Examine, NotRegularError, accept_any, again, open_descriptor

_HASHED_BYTES = 1 << 18
_CHUNK_BYTES = 1 << 20

ABSENT_ERRORS = (errno.ENOENT, errno.ENOTDIR)
MOVED_ERRORS = frozenset({errno.ESTALE, errno.EBUSY})
"""On a network file system: the file that had this name is gone, or about to be; its name is looked up again."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with one blob: it is not there, or it is not what its digest says."""

    state: Literal["missing", "corrupt"]
    reason: str


def damage_of(error: OSError) -> str | None:
    """Returns what is wrong with the file, where `error` says that; None where the system refuses to let us look."""
    if isinstance(error, NotRegularError):
        return error.strerror
    return "cannot be read: input/output error" if error.errno == errno.EIO else None


class _UnwritableError(Exception):
    """What is copied could not be written, which says nothing about what is read."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(str(reason))
        self.reason = reason


def find_fault(path: Path, digest: Digest, examine: Examine = accept_any) -> Fault | None:
    """Reads the file once and returns what is wrong with it, or None when it is intact.

    Safe in threads: hashing releases the interpreter lock. Raises StoreError where the system refuses to
    let us look (permissions, file descriptors), which says nothing about the bytes, and what `examine` raises.
    """
    found = hold_blob(path, digest, examine)
    if isinstance(found, Fault):
        return found
    os.close(found)
    return None


def hold_blob(path: Path, digest: Digest, examine: Examine = accept_any) -> int | Fault:
    """Reads the file once; returns the descriptor through which it was found intact, or what is wrong with it.

    The descriptor is open for reading, and the caller's to close. As long as it is open the file that was hashed can
    be read and mapped, whatever its name has come to name. Raises as `find_fault` does.
    """
    try:
        return again(lambda: _hold(path, digest, examine), retry_on=MOVED_ERRORS)
    except OSError as error:
        return _classify(path, error)


def copy_blob(path: Path, digest: Digest, target: int, examine: Examine = accept_any) -> Fault | None:
    """Reads the file once, hashing what it writes to the open file `target`; returns what is wrong with it.

    What was written is of no use where something is. Raises as `find_fault` does, and OSError where `target` cannot be
    written to.
    """

    def copy() -> Fault | None:
        os.ftruncate(target, os.lseek(target, 0, os.SEEK_SET))
        found = _hold(path, digest, examine, target)
        if isinstance(found, Fault):
            return found
        os.close(found)
        return None

    try:
        return again(copy, retry_on=MOVED_ERRORS)
    except _UnwritableError as error:
        raise error.reason from error
    except OSError as error:
        return _classify(path, error)


def read_blob(path: Path, digest: Digest, examine: Examine = accept_any) -> bytes | Fault:
    """Returns the file's bytes if they are those that `digest` names, else what is wrong with them.

    The bytes returned are the very bytes that were hashed. Raises as `find_fault` does.
    """
    try:
        data = again(lambda: _read(path, digest.size_bytes, examine, digest), retry_on=MOVED_ERRORS)
    except OSError as error:
        return _classify(path, error)
    return data if isinstance(data, Fault) else _compare(Digest.of(data), digest) or data


def read_bounded(path: Path, max_bytes: int, examine: Examine = accept_any) -> bytes | Fault:
    """Returns a file's bytes, of any content, or why not: a fault too where there are more than `max_bytes`.

    Raises as `find_fault` does.
    """
    try:
        data = again(lambda: _read(path, max_bytes, examine), retry_on=MOVED_ERRORS)
    except OSError as error:
        return _classify(path, error)
    if not isinstance(data, Fault) and len(data) > max_bytes:
        return Fault("corrupt", f"has more than {max_bytes} bytes")
    return data


def hash_descriptor(descriptor: int, digest: Digest, target: int | None = None) -> Fault | None:
    """Reads an open file from where it is at; returns how it differs from `digest`. Raises OSError.

    What is hashed is written to the open file `target`, if one is given.
    """
    with io.FileIO(descriptor, "rb", closefd=False) as file:
        return _compare(_hash(file, digest.size_bytes, target), digest)


def verified_chunks(path: Path, digest: Digest, remedy: str = "") -> Iterator[bytes]:
    """Yields exactly the bytes that `digest` names. Raises CorruptError, with the `remedy`, and StoreError.

    The file is verified before the first piece is given, and again with the last, for it may change meanwhile.
    """
    found = hold_blob(path, digest)
    if isinstance(found, Fault):
        raise CorruptError(f"{path}: {found.reason}" + (f" ({remedy})" if remedy else ""))
    state = hashlib.sha256()
    try:
        for start in range(0, digest.size_bytes, _CHUNK_BYTES):
            chunk = os.pread(found, min(_CHUNK_BYTES, digest.size_bytes - start), start)
            state.update(chunk)
            yield chunk
    except OSError as error:
        raise store_error("read", path, error) from error
    finally:
        os.close(found)
    if state.hexdigest() != digest.sha256:
        raise CorruptError(f"{path}: was changed while it was read")


def _hold(path: Path, digest: Digest, examine: Examine, target: int | None = None) -> int | Fault:
    descriptor = open_descriptor(path, examine=examine)
    try:
        fault = _check_size(descriptor, digest) or hash_descriptor(descriptor, digest, target)
    except BaseException:
        os.close(descriptor)
        raise
    if fault is None:
        return descriptor
    os.close(descriptor)
    return fault


def _read(path: Path, size_bytes: int, examine: Examine, digest: Digest | None = None) -> bytes | Fault:
    """At most a byte more than `size_bytes`; nothing where the size is not that of `digest`."""
    descriptor = open_descriptor(path, examine=examine)
    try:
        fault = None if digest is None else _check_size(descriptor, digest)
        if fault is not None:
            return fault
        with io.BufferedReader(io.FileIO(descriptor, "rb", closefd=False)) as file:
            return file.read(size_bytes + 1)
    finally:
        os.close(descriptor)


def _check_size(descriptor: int, digest: Digest) -> Fault | None:
    size_bytes = os.fstat(descriptor).st_size
    return None if size_bytes == digest.size_bytes else _wrong_size(size_bytes, digest)


def _hash(file: io.FileIO, size_bytes: int, target: int | None) -> Digest:
    state, done = hashlib.sha256(), 0
    buffer = bytearray(max(1, min(_HASHED_BYTES, size_bytes + 1)))
    view = memoryview(buffer)
    while done <= size_bytes and (count := file.readinto(buffer)):
        state.update(view[:count])
        _write(target, view[:count])
        done += count
    return Digest(state.hexdigest(), done)


def _write(target: int | None, view: memoryview) -> None:
    while target is not None and view:
        try:
            view = view[os.write(target, view) :]
        except OSError as error:
            raise _UnwritableError(error) from error


def _compare(found: Digest, named: Digest) -> Fault | None:
    if found.size_bytes != named.size_bytes:
        return _wrong_size(found.size_bytes, named)
    if found.sha256 != named.sha256:
        return Fault("corrupt", f"sha256 is {found.sha256[:12]}..., should be {named.sha256[:12]}...")
    return None


def _wrong_size(size_bytes: int, digest: Digest) -> Fault:
    return Fault("corrupt", f"has {size_bytes} bytes, should have {digest.size_bytes}")


def _classify(path: Path, error: OSError) -> Fault:
    reason = damage_of(error)
    if error.errno in ABSENT_ERRORS:
        return Fault("missing", "no such file")
    if reason is not None:
        return Fault("corrupt", reason)
    raise store_error("read", path, error) from error
