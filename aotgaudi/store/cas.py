"""Content-addressed objects: immutable files named by the sha256 of their bytes.

Layout (version history in docs/formats/store.md)::

    objects/sha256/<first 2 hex digits>/<64 hex digits>    mode 0444

An object is whole or absent, even after a power cut (atomicfile.py). Writers need no lock: two writers of one digest
write the same bytes, and the last rename wins.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, MissingObjectError, StoreError, store_error
from aotgaudi.files import Temporary, fsync_dir, open_descriptor, place, temporary_file
from aotgaudi.store.blobs import Fault, copy_blob, find_fault, read_blob
from aotgaudi.store.quarantine import quarantine, try_quarantine

__all__ = ["ObjectStore", "fsync_dir", "object_path"]

_CHUNK_BYTES = 1 << 20
_OBJECT_MODE = 0o444


def object_path(root: Path, digest: Digest) -> Path:
    """Returns where an object with this digest lies under `root` (a store's or a bundle's)."""
    return Path(_object_name(str(root), digest))


class ObjectStore:
    """The objects under `root`, and behind them those of the read-only layers `lower`, in order.

    Safe in threads and between processes. A look-up uses the first layer that has the object. A write goes to
    `root`, unless a layer already has the same bytes intact. Putting bytes that are already stored re-hashes the
    stored object, keeps it if it is intact and replaces it if it is damaged: only then are the right bytes at hand.

    With `heals`, an object in `root` that `read` or `verify` finds corrupt is moved to quarantine, so that the next
    look-up is a plain miss.
    """

    def __init__(self, root: Path, lower: Iterable[Path] = (), *, heals: bool = False) -> None:
        self.root = root
        self.lower = tuple(lower)
        self._tmp = root / "tmp"
        self._heals = heals
        self._names = tuple(map(str, (root, *self.lower)))

    def put_bytes(self, data: bytes) -> Digest:
        """Stores `data` and returns its digest. Raises StoreError; then nothing is left behind."""
        digest = Digest.of(data)
        try:
            if self._is_intact(digest):
                return digest
            with temporary_file(self._tmp) as file:
                file.write(data)
                self._publish(file, digest)
        except OSError as error:
            raise store_error("store an object in", self.root, error, needed_bytes=len(data)) from error
        return digest

    def put_file(self, path: Path) -> Digest:
        """Stores a copy of the file at `path` and returns its digest; what was hashed is what is stored.

        Raises StoreError when `path` is not a readable regular file or the store cannot be written to;
        then nothing is left behind.
        """
        with _open_source(path) as source:
            size_bytes = os.fstat(source.fileno()).st_size
            try:
                with temporary_file(self._tmp) as file:
                    digest = _copy_hashed(source, file)
                    if not self._is_intact(digest):
                        self._publish(file, digest)
            except OSError as error:
                doing = f"store {path.name} in"
                raise store_error(doing, self.root, error, needed_bytes=size_bytes) from error
        return digest

    def has(self, digest: Digest) -> bool:
        """Whether a layer has a regular file of the right size. One ``lstat`` a layer; does not read it."""
        return self._layer_with(digest) is not None

    def has_all(self, sizes: Mapping[str, Any]) -> bool:
        """Whether every object is there; `sizes` maps sha256 to size in bytes. As `has`."""
        return all(self._layer_with(Digest(sha256, size)) for sha256, size in sizes.items())

    def path(self, digest: Digest) -> Path:
        """Returns the path of an object that `has` finds; its bytes are not verified.

        Raises StoreError when it is absent and CorruptError when it has another size or is not a file.
        """
        layer = self._layer_with(digest)
        if layer is None:
            self.verify(digest)
            layer = self._names[0]  # It was published between the two looks.
        return Path(_object_name(layer, digest))

    def read(self, digest: Digest) -> bytes:
        """Returns an object's bytes, verified. Raises StoreError (absent) and CorruptError."""
        faults = []
        for layer in (self.root, *self.lower):
            data = read_blob(object_path(layer, digest), digest)
            if not isinstance(data, Fault):
                return data
            faults.append(self._noted(layer, digest, data))
        raise self._error(digest, faults)

    def copy_to(self, digest: Digest, target: int) -> None:
        """Writes an object's bytes to the open file `target`, verified on the way. Raises as `read` does.

        What was written is of no use where it raises.
        """
        faults = []
        for layer in (self.root, *self.lower):
            fault = copy_blob(object_path(layer, digest), digest, target)
            if fault is None:
                return
            faults.append(self._noted(layer, digest, fault))
        raise self._error(digest, faults)

    def verify(self, digest: Digest) -> None:
        """Re-hashes one object, in the layer that `path` names. Raises StoreError (absent) and CorruptError."""
        layer = Path(self._layer_with(digest) or self._names[0])
        fault = find_fault(object_path(layer, digest), digest)
        if fault is not None:
            raise self._error(digest, [self._noted(layer, digest, fault)])

    def discard(self, digest: Digest) -> None:
        """Removes an object from `root` if it is there, so that the next build makes it again. Raises StoreError."""
        path = object_path(self.root, digest)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise store_error("remove", path, error) from error

    def digests(self) -> Iterator[Digest]:
        """Yields the digest that each object in `root` claims by name and size, unverified and unordered.

        Other files are skipped: a store tolerates files that it did not write.
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
        return any(_holds_intact(Path(layer), digest) for layer in self._names)

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
            quarantine(self.root, path, "a directory in an object's place")
        place(file.path, path, lambda: _holds_intact(self.root, digest))

    def _noted(self, layer: Path, digest: Digest, fault: Fault) -> tuple[Path, Fault]:
        path = object_path(layer, digest)
        if self._heals and layer == self.root and fault.state == "corrupt":
            try_quarantine(self.root, path, fault.reason)
        return path, fault

    def _error(self, digest: Digest, faults: list[tuple[Path, Fault]]) -> StoreError | CorruptError:
        for where, fault in faults:
            if fault.state == "corrupt":
                is_moved = self._heals and where == object_path(self.root, digest)
                remedy = "moved to quarantine: build again" if is_moved else "run `aotgaudi cache fsck`"
                return CorruptError(f"object {digest} is corrupt: {where}: {fault.reason} ({remedy})")
        where, fault = faults[0]
        return MissingObjectError(
            f"object {digest} is not in the store: {where}: {fault.reason} (build it again)"
        )


def _object_name(root: str, digest: Digest) -> str:
    return f"{root}/objects/sha256/{digest.sha256[:2]}/{digest.sha256}"


def _holds_intact(root: Path, digest: Digest) -> bool:
    return find_fault(object_path(root, digest), digest) is None


def _open_source(path: Path) -> io.FileIO:
    try:
        return io.FileIO(open_descriptor(path, follow=True), "rb")
    except OSError as error:
        raise store_error("read", path, error) from error


def _copy_hashed(source: io.FileIO, target: Temporary) -> Digest:
    state, size_bytes = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK_BYTES):
        state.update(chunk)
        target.write(chunk)
        size_bytes += len(chunk)
    return Digest(state.hexdigest(), size_bytes)
