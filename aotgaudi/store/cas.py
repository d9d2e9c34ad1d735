"""Content-addressed objects: immutable files that are named by the sha256 of their bytes.

Layout (version history in docs/formats/store.md)::

    objects/sha256/<first 2 hex digits>/<64 hex digits>    mode 0444

An object is whole or absent, even after a power cut (files.py). Writers need no lock, because two writers of one digest
write the same bytes, and the last rename wins.

Readers open only regular files (`files.open_descriptor`). Anything else at an object's path is a fault. They compare the
size first, so that a truncated file costs one ``fstat``, and never read more than ``size + 1`` bytes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, MissingObjectError, StoreError, store_error, store_errors
from aotgaudi.files import (
    Examine,
    NotRegularError,
    Temporary,
    accept_any,
    again,
    open_descriptor,
    place,
    temporary_file,
)

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
_HASHED_BYTES = 1 << 18
_CHUNK_BYTES = 1 << 20

_ABSENT_ERRORS = (errno.ENOENT, errno.ENOTDIR)
MOVED_ERRORS = frozenset({errno.ESTALE, errno.EBUSY})
"""Errors of a network file system for a file that is gone or about to go. Its name is then looked up again."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The fault of one blob: it is missing, or does not match its digest."""

    state: Literal["missing", "corrupt"]
    reason: str


def remove(path: Path) -> bool:
    """Removes a file or a directory. Returns False if it is gone already. Raises StoreError."""
    try:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise store_error("remove", path, error) from error
    return True


def discard_damaged(path: Path, reason: str) -> bool:
    """Removes what is damaged, so that it is a miss and is made again. Returns False if it is gone. Raises StoreError."""
    is_removed = remove(path)
    if is_removed:
        _LOG.warning("removed %s: %s", path, reason)
    return is_removed


class _UnwritableError(Exception):
    """The copy could not be written, which says nothing about the original."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(str(reason))
        self.reason = reason


def find_fault(path: Path, digest: Digest, examine: Examine = accept_any) -> Fault | None:
    """Reads the file once and returns its fault, or None if it is intact.

    Useful in threads, since hashing releases the interpreter lock. Raises StoreError if the system does not let us look
    (permissions, file descriptors), which says nothing about the bytes, and what `examine` raises.
    """
    found = hold_blob(path, digest, examine)
    if isinstance(found, Fault):
        return found
    os.close(found)
    return None


def hold_blob(
    path: Path, digest: Digest, examine: Examine = accept_any, *, hashes: bool = True
) -> int | Fault:
    """Reads the file once, and returns the descriptor through which it was found intact, or its fault.

    The descriptor is open for reading, and the caller closes it. While it is open, the caller can read and map the file that
    was hashed, even if the path names another file by then. Without `hashes`, only the size is compared. Raises as
    `find_fault` does.
    """
    return look(path, lambda: _hold(path, digest, examine, hashes=hashes))


def copy_blob(path: Path, digest: Digest, target: int, examine: Examine = accept_any) -> Fault | None:
    """Reads and hashes the file once, copies it to the open file `target`, and returns the file's fault or None.

    If there is a fault, the copy is useless. Raises as `find_fault` does, and OSError if `target` cannot be written.
    """

    def copy() -> Fault | None:
        os.ftruncate(target, os.lseek(target, 0, os.SEEK_SET))
        found = _hold(path, digest, examine, target)
        if isinstance(found, Fault):
            return found
        os.close(found)
        return None

    return look(path, copy)


def read_blob(path: Path, digest: Digest, examine: Examine = accept_any) -> bytes | Fault:
    """Returns the file's bytes if they match `digest`, else the file's fault.

    The returned bytes are exactly the bytes that were hashed. Raises as `find_fault` does.
    """
    data = look(path, lambda: _read(path, digest.size_bytes, examine, digest))
    return data if isinstance(data, Fault) else _compare(Digest.of(data), digest) or data


def read_bounded(path: Path, max_bytes: int, examine: Examine = accept_any) -> bytes | Fault:
    """Returns a file's bytes, whatever they are, or its fault. More than `max_bytes` is a fault too.

    Raises as `find_fault` does.
    """
    data = look(path, lambda: _read(path, max_bytes, examine))
    if not isinstance(data, Fault) and len(data) > max_bytes:
        return Fault("corrupt", f"has more than {max_bytes} bytes")
    return data


def verified_chunks(path: Path, digest: Digest, remedy: str = "") -> Iterator[bytes]:
    """Yields exactly the bytes that `digest` names. Raises CorruptError, with the `remedy`, and StoreError.

    The file is verified before the first piece, and again with the last, because it may change in between.
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


def _hold(
    path: Path, digest: Digest, examine: Examine, target: int | None = None, *, hashes: bool = True
) -> int | Fault:
    descriptor = open_descriptor(path, examine=examine)
    try:
        fault = _check_size(descriptor, digest)
        if fault is None and hashes:
            with io.FileIO(descriptor, "rb", closefd=False) as file:
                fault = _compare(_hash(file, digest.size_bytes, target), digest)
    except BaseException:
        os.close(descriptor)
        raise
    if fault is None:
        return descriptor
    os.close(descriptor)
    return fault


def _read(path: Path, size_bytes: int, examine: Examine, digest: Digest | None = None) -> bytes | Fault:
    """Returns at most one byte more than `size_bytes`, or a fault. Reads nothing if the size is not that of `digest`."""
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


def look(path: Path | str, action: Callable[[], T]) -> T | Fault:
    """Returns what `action` returns, or the fault of the file that its error tells. Raises as `find_fault` does."""
    try:
        return again(action, retry_on=MOVED_ERRORS)
    except _UnwritableError as error:
        raise error.reason from error
    except OSError as error:
        if error.errno in _ABSENT_ERRORS:
            return Fault("missing", "no such file")
        if isinstance(error, NotRegularError):
            return Fault("corrupt", f"not a regular file: {error.kind}")
        if error.errno == errno.EIO:
            return Fault("corrupt", "cannot be read: input/output error")
        raise store_error("read", Path(path), error) from error


_OBJECT_MODE = 0o444


def object_path(root: Path, digest: Digest) -> Path:
    """Returns the path of the object with this digest under `root` (a store's or a bundle's)."""
    return Path(_object_name(str(root), digest))


class ObjectStore:
    """The objects under `root`, and behind them those of the read-only layers `lower`, in order.

    Safe in threads and between processes. A look-up uses the first layer that has the object. A write goes to `root`, unless
    a layer already has the same bytes intact. Storing bytes that are already stored hashes the stored object again. It is
    kept if intact, and replaced if damaged, since only then are the right bytes at hand.

    With `heals`, an object in `root` that `read` or `verify` finds corrupt is removed, so that the next look-up is a plain
    miss.
    """

    def __init__(self, root: Path, lower: Iterable[Path] = (), *, heals: bool = False) -> None:
        self.root = root
        self.lower = tuple(lower)
        self._tmp = root / "tmp"
        self._heals = heals
        self._names = tuple(map(str, (root, *self.lower)))

    def put_bytes(self, data: bytes) -> Digest:
        """Stores `data` and returns its digest. If it raises StoreError, nothing is left behind."""
        digest = Digest.of(data)
        if not self._is_intact(digest):
            self.put_chunks(digest, [data])
        return digest

    def put_file(self, path: Path) -> Digest:
        """Stores a copy of the file at `path` and returns the digest of the copy.

        Raises StoreError, and leaves nothing behind, if `path` is not a readable regular file or the store cannot be
        written.
        """
        with _open_source(path) as source:
            size_bytes = os.fstat(source.fileno()).st_size
            errors = store_errors(f"store {path.name} in", self.root, needed_bytes=size_bytes)
            with errors, temporary_file(self._tmp) as file:
                digest = _copy_hashed(source, file)
                if not self._is_intact(digest):
                    self._publish(file, digest)
        return digest

    def put_chunks(self, digest: Digest, chunks: Iterable[bytes]) -> None:
        """Stores the object `digest`, which arrives in pieces, in `root`. Writes no more bytes than it has.

        Raises CorruptError if the pieces are not what the digest says, StoreError, and what `chunks` raises. It then leaves
        nothing behind.
        """
        state, size_bytes = hashlib.sha256(), 0
        errors = store_errors("store an object in", self.root, needed_bytes=digest.size_bytes)
        with errors, temporary_file(self._tmp) as file:
            for chunk in chunks:
                size_bytes += len(chunk)
                if size_bytes > digest.size_bytes:
                    break
                file.write(chunk)
                state.update(chunk)
            if Digest(state.hexdigest(), size_bytes) != digest:
                raise CorruptError(f"object {digest}: its bytes are not what its digest says")
            self._publish(file, digest)

    def has(self, digest: Digest) -> bool:
        """Returns whether a layer has a regular file of the right size, without reading it. One ``lstat`` per layer."""
        return self._layer_with(digest) is not None

    def has_all(self, sizes: Mapping[str, Any]) -> bool:
        """Returns whether every object is there, as `has` does. `sizes` maps sha256 to size in bytes."""
        return all(self._layer_with(Digest(sha256, size)) for sha256, size in sizes.items())

    def path(self, digest: Digest) -> Path:
        """Returns the path of an object that `has` finds. Its bytes are not verified.

        Raises StoreError if it is absent, and CorruptError if it has another size or is not a file.
        """
        layer = self._layer_with(digest)
        if layer is None:
            self.verify(digest)
            layer = self._names[0]  # It was published in between.
        return Path(_object_name(layer, digest))

    def read(self, digest: Digest) -> bytes:
        """Returns an object's verified bytes. Raises StoreError (absent) and CorruptError."""
        return self._from_layers(digest, lambda path: read_blob(path, digest))

    def copy_to(self, digest: Digest, target: int) -> None:
        """Copies an object to the open file `target`, and verifies it on the way. Raises as `read` does.

        If it raises, the copy is useless.
        """
        self._from_layers(digest, lambda path: copy_blob(path, digest, target))

    def verify(self, digest: Digest) -> None:
        """Hashes an object again, in the layer of `path`. Raises StoreError (absent) and CorruptError."""
        layer = Path(self._layer_with(digest) or self._names[0])
        fault = find_fault(object_path(layer, digest), digest)
        if fault is not None:
            raise self._error(digest, [self._noted(layer, digest, fault)])

    def discard(self, digest: Digest) -> None:
        """Removes an object from `root`, if it is there, so that the next build makes it again. Raises StoreError."""
        remove(object_path(self.root, digest))

    def digests(self) -> Iterator[Digest]:
        """Yields the digest that each object in `root` claims by name and size, unverified and in no order.

        Other files are skipped, since a store tolerates files that it did not write.
        """
        for path in (self.root / "objects" / "sha256").glob("[0-9a-f][0-9a-f]/*"):
            with contextlib.suppress(ValueError, FileNotFoundError):
                yield Digest.parse(f"sha256:{path.name}:{path.lstat().st_size}")

    def _layer_with(self, digest: Digest) -> str | None:
        for layer in self._names:
            try:
                status = os.lstat(_object_name(layer, digest))
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode) and status.st_size == digest.size_bytes:
                return layer
        return None

    def _is_intact(self, digest: Digest) -> bool:
        return any(find_fault(Path(_object_name(layer, digest)), digest) is None for layer in self._names)

    def _publish(self, file: Temporary, digest: Digest) -> None:
        path = object_path(self.root, digest)
        file.settle(_OBJECT_MODE)
        fault = find_fault(file.path, digest)
        if fault is not None:
            raise StoreError(
                f"cannot store an object in {self.root}: what was written to {file.path} reads back differently:"
                f" {fault.reason} (the device failed: check it before trusting what it holds)"
            )
        if path.is_dir() and not path.is_symlink():
            discard_damaged(path, "a directory in an object's place")
        place(file.path, path, lambda: find_fault(path, digest) is None)

    def _from_layers(self, digest: Digest, get: Callable[[Path], T | Fault]) -> T:
        faults = []
        for layer in (self.root, *self.lower):
            found = get(object_path(layer, digest))
            if not isinstance(found, Fault):
                return found
            faults.append(self._noted(layer, digest, found))
        raise self._error(digest, faults)

    def _noted(self, layer: Path, digest: Digest, fault: Fault) -> tuple[Path, Fault]:
        path = object_path(layer, digest)
        if self._heals and layer == self.root and fault.state == "corrupt":
            try:
                discard_damaged(path, fault.reason)
            except StoreError as error:
                _LOG.warning("%s is damaged (%s) and stays: %s", path, fault.reason, error)
        return path, fault

    def _error(self, digest: Digest, faults: list[tuple[Path, Fault]]) -> StoreError | CorruptError:
        for where, fault in faults:
            if fault.state == "corrupt":
                is_removed = self._heals and where == object_path(self.root, digest)
                remedy = "removed: build again" if is_removed else "run `aotgaudi cache fsck`"
                return CorruptError(f"object {digest} is corrupt: {where}: {fault.reason} ({remedy})")
        where, fault = faults[0]
        return MissingObjectError(
            f"object {digest} is not in the store: {where}: {fault.reason} (build it again)"
        )


def _object_name(root: str, digest: Digest) -> str:
    return f"{root}/objects/sha256/{digest.sha256[:2]}/{digest.sha256}"


def _open_source(path: Path) -> io.FileIO:
    with store_errors("read", path):
        return io.FileIO(open_descriptor(path, follow=True), "rb")


def _copy_hashed(source: io.FileIO, target: Temporary) -> Digest:
    state, size_bytes = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK_BYTES):
        state.update(chunk)
        target.write(chunk)
        size_bytes += len(chunk)
    return Digest(state.hexdigest(), size_bytes)
