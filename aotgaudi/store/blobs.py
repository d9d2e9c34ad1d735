"""Reading a file that is named by its digest, and saying what is wrong with it.

Nothing but a regular file is ever opened for reading: a symbolic link, a FIFO, a device or a directory at
an object's path is a fault, and cannot make the reader follow, block or act. The size is compared first, so
that a truncated file costs one ``fstat``; never more than ``size + 1`` bytes are read.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aotgaudi.digest import Digest
from aotgaudi.store.faults import store_error

_CHUNK_BYTES = 1 << 18
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ABSENT_ERRORS = (errno.ENOENT, errno.ENOTDIR)
_NOT_READABLE_FILE = {
    errno.ELOOP: "not a regular file: a symbolic link",
    errno.ENXIO: "not a regular file: a socket or a device",
    errno.ENODEV: "not a regular file: a device",
    errno.EIO: "cannot be read: input/output error",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with one blob: it is not there, or it is not what its digest says."""

    state: Literal["missing", "corrupt"]
    reason: str


def find_fault(path: Path, digest: Digest) -> Fault | None:
    """Reads the file once and returns what is wrong with it, or None when it is intact.

    Safe in threads: hashing releases the interpreter lock. Raises StoreError where the system refuses to
    let us look (permissions, file descriptors), which says nothing about the bytes.
    """
    try:
        opened = _open(path, digest)
        if isinstance(opened, Fault):
            return opened
        with opened as file:
            return _compare(_hash(file, digest.size_bytes), digest)
    except OSError as error:
        return _classify(path, error)


def read_blob(path: Path, digest: Digest) -> bytes | Fault:
    """Returns the file's bytes if they are those that `digest` names, else what is wrong with them.

    The bytes returned are the very bytes that were hashed. Raises StoreError as `find_fault` does.
    """
    try:
        opened = _open(path, digest)
        if isinstance(opened, Fault):
            return opened
        with io.BufferedReader(opened) as file:
            data = file.read(digest.size_bytes + 1)
        return _compare(Digest.of(data), digest) or data
    except OSError as error:
        return _classify(path, error)


def _open(path: Path, digest: Digest) -> io.FileIO | Fault:
    descriptor = os.open(path, _OPEN_FLAGS)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_size == digest.size_bytes:
        return io.FileIO(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISREG(status.st_mode):
        return _wrong_size(status.st_size, digest)
    kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a FIFO or a device"
    return Fault("corrupt", f"not a regular file: {kind}")


def _hash(file: io.FileIO, size_bytes: int) -> Digest:
    state, done = hashlib.sha256(), 0
    buffer = bytearray(max(1, min(_CHUNK_BYTES, size_bytes + 1)))
    view = memoryview(buffer)
    while done <= size_bytes and (count := file.readinto(buffer)):
        state.update(view[:count])
        done += count
    return Digest(state.hexdigest(), done)


def _compare(found: Digest, named: Digest) -> Fault | None:
    if found.size_bytes != named.size_bytes:
        return _wrong_size(found.size_bytes, named)
    if found.sha256 != named.sha256:
        return Fault("corrupt", f"sha256 is {found.sha256[:12]}..., should be {named.sha256[:12]}...")
    return None


def _wrong_size(size_bytes: int, digest: Digest) -> Fault:
    return Fault("corrupt", f"has {size_bytes} bytes, should have {digest.size_bytes}")


def _classify(path: Path, error: OSError) -> Fault:
    if error.errno in _ABSENT_ERRORS:
        return Fault("missing", "no such file")
    if error.errno in _NOT_READABLE_FILE:
        return Fault("corrupt", _NOT_READABLE_FILE[error.errno])
    raise store_error("read", path, error) from error
