"""Verified objects that stay what was verified: held by the descriptors through which they were hashed.

An object is opened once. What is read or mapped later is reached through that descriptor (``/proc/self/fd/<n>``),
so that a file put in its place by name meanwhile changes nothing.

A descriptor stays open for as long as anything may be mapped from it: ``dlopen`` takes a path that it has seen for
the library that it has, and a number that was closed and came back would be another file under the old path.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, StoreError, store_error
from aotgaudi.store.blobs import Examine, Fault, accept_any, hold_blob

_DESCRIPTORS = Path("/proc/self/fd")
_SPARE_FILES = 64
"""What a process needs besides for sockets, libraries and weights, at the least."""


class HeldObjects:
    """Objects by digest, each open. Safe in threads."""

    def __init__(self) -> None:
        self._descriptors: dict[Digest, int] = {}

    def __len__(self) -> int:
        return len(self._descriptors)

    def hold(self, path: Path, digest: Digest, examine: Examine = accept_any) -> Fault | None:
        """Opens, hashes and keeps the object at `path`, unless one of that digest is held. Returns what is wrong.

        Raises as `blobs.find_fault` does.
        """
        if digest in self._descriptors:
            return None
        found = hold_blob(path, digest, examine)
        if isinstance(found, Fault):
            return found
        if self._descriptors.setdefault(digest, found) != found:
            os.close(found)  # Another thread was first.
        return None

    def path(self, digest: Digest) -> Path:
        """Returns a path that opens the very file that was verified, in this process. Raises KeyError."""
        return _DESCRIPTORS / str(self._descriptors[digest])

    def read(self, digest: Digest) -> bytes:
        """Returns an object's bytes, hashed again as read. Raises KeyError; CorruptError where they were changed."""
        descriptor = self._descriptors[digest]
        try:
            data = os.pread(descriptor, digest.size_bytes + 1, 0)
        except OSError as error:
            raise store_error("read", self.path(digest), error) from error
        if Digest.of(data) != digest:
            raise CorruptError(f"object {digest} was changed after it was verified")
        return data

    def close(self) -> None:
        """Closes every descriptor. Only where nothing was mapped from them, or nothing is loaded any more."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def allow_open_files(num_files: int) -> None:
    """Raises this process's soft limit of open files by `num_files`, to the hard limit at most.

    Raises StoreError where even that is too few, or ``/proc`` is not mounted.
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
            f"{num_files} objects are held open while they are loaded, and this process may open {limit} files"
            f" (raise the hard limit to {num_open + num_files + _SPARE_FILES} or more: `ulimit -Hn`,"
            " LimitNOFILE=, or --ulimit nofile=)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
