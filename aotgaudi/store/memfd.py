"""Objects in sealed memory: a reader maps exactly the bytes that were hashed, whatever happens to the original file.

An object is copied into an anonymous file (memfd_create(2)) and hashed on the way. The copy is then sealed. No process, not
even this one, can write to it, change its size, or remove the seals (fcntl(2), F_ADD_SEALS). If the original file is
overwritten or truncated, or its device is lost, the copy does not change.

A descriptor may be closed once its library is mapped. ``dlopen`` identifies a library by its path, and the kernel reuses
descriptor numbers. So the path of an object contains its inode number, which no other file gets while this one is mapped.
"""

from __future__ import annotations

import fcntl
import os
import resource
from pathlib import Path

from aotgaudi.digest import Digest
from aotgaudi.errors import StoreError, store_errors
from aotgaudi.files import Examine, accept_any
from aotgaudi.store.cas import Fault, copy_blob, hold_blob

_DESCRIPTORS = Path("/proc/self/fd")
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""No process may write, change the size, or add or remove seals."""

_SPARE_FILES = 64
"""How many other files a process needs at least, for sockets, libraries and weights."""


class SealedObjects:
    """Objects by digest, each in sealed memory until `close`. Thread-safe.

    Without `hashes`, objects are neither hashed nor copied: their files are kept open.
    """

    def __init__(self, *, hashes: bool = True) -> None:
        self._descriptors: dict[Digest, int] = {}
        self._hashes = hashes

    def __len__(self) -> int:
        return len(self._descriptors)

    def hold(self, path: Path, digest: Digest, examine: Examine = accept_any) -> Fault | None:
        """Copies and hashes the object at `path`, unless its digest is held already. Returns its fault or None.

        Raises as `find_fault` does, and StoreError if the system does not provide such memory.
        """
        if digest in self._descriptors:
            return None
        found = (
            _sealed_copy(path, digest, examine)
            if self._hashes
            else hold_blob(path, digest, examine, hashes=False)
        )
        if isinstance(found, Fault):
            return found
        if self._descriptors.setdefault(digest, found) != found:
            os.close(found)  # Another thread was first.
        return None

    def path(self, digest: Digest) -> Path:
        """Returns a path that opens the sealed copy in this process until `close`. Raises KeyError."""
        descriptor = self._descriptors[digest]
        inode = os.fstat(descriptor).st_ino
        steps = "".join("/../../self/fd" if bit == "1" else "/../fd" for bit in f"{inode:b}")
        return Path(f"{_DESCRIPTORS}{steps}", str(descriptor))

    def read(self, digest: Digest) -> bytes:
        """Returns an object's bytes. Raises KeyError."""
        return os.pread(self._descriptors[digest], digest.size_bytes, 0)

    def close(self) -> None:
        """Closes every descriptor. Mapped memory stays mapped."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def allow_open_files(num_files: int) -> None:
    """Raises this process's soft limit of open files by `num_files`, but not above the hard limit.

    Raises StoreError if even that is too low, or if ``/proc`` is not mounted.
    """
    try:
        num_open = len(os.listdir(_DESCRIPTORS))
    except OSError as error:
        raise StoreError(f"cannot list {_DESCRIPTORS}: {error.strerror} (mount /proc)") from error
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    limit = soft + num_files if hard == resource.RLIM_INFINITY else min(hard, soft + num_files)
    if num_open + num_files + _SPARE_FILES > limit:
        raise StoreError(
            f"{num_files} objects are open at once while they are loaded, and this process may open {limit} files"
            f" (raise the hard limit to {num_open + num_files + _SPARE_FILES} or more: `ulimit -Hn`,"
            " LimitNOFILE=, or --ulimit nofile=)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _sealed_copy(path: Path, digest: Digest, examine: Examine) -> int | Fault:
    with store_errors("make sealed memory (memfd_create) for", Path(path.name)):
        memory = os.memfd_create(path.name[:64], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with store_errors("copy into sealed memory", path):
            fault = copy_blob(path, digest, memory, examine)
            if fault is None:
                fcntl.fcntl(memory, fcntl.F_ADD_SEALS, SEALS)
                return memory
    except BaseException:
        os.close(memory)
        raise
    os.close(memory)
    return fault
