"""Checks a whole store: hashes every object and record again, and moves damaged ones to quarantine.

It needs no lock, so builders may run meanwhile. A damaged file is moved and then checked again. If a builder repaired it in
between, it is moved back.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError
from aotgaudi.store.cas import find_fault, object_path
from aotgaudi.store.quarantine import quarantine, release
from aotgaudi.store.records import RecordError, digests_in, read_record
from aotgaudi.store.store import Store

_HEX = re.compile(r"[0-9a-f]{64}")
_FAN_OUT = re.compile(r"[0-9a-f]{2}")
_NFS_REMOVED = ".nfs"
"""NFS gives this prefix to a file that was removed while open. The file disappears by itself."""

Problem = Callable[[Path, Path], "str | None"]
"""Returns what is wrong with the bytes at the first path, which were found at the second; None if they are intact."""


@dataclass(frozen=True)
class Damage:
    """A file whose content does not match its name: its path (relative to the store), the reason, and where it is now.

    `moved_to` is None for a file that stays in place, which is a root, or any file if nothing may be moved.
    """

    path: str
    reason: str
    moved_to: str | None = None


@dataclass(frozen=True)
class Loss:
    """A result that no longer counts, because its objects are missing. The next build makes it again."""

    key: str
    value: dict[str, Any]
    missing: tuple[Digest, ...]


@dataclass(frozen=True)
class FsckReport:
    """The files that were read, those that are damaged, and the results that the next build restores."""

    num_objects: int
    num_records: int
    object_bytes: int
    damage: tuple[Damage, ...]
    losses: tuple[Loss, ...]

    @property
    def is_clean(self) -> bool:
        """Whether every file matches its name. Missing objects are no damage."""
        return not self.damage


def check_store(store: Store, num_threads: int = 1, *, move: bool = True) -> FsckReport:
    """Hashes everything in `store` (not in its lower layers) again, with `num_threads` threads, and reports the damage.

    Damaged files are moved to quarantine unless `move` is False or the store is read-only.

    Raises StoreError if the store cannot be read or a damaged file cannot be moved.
    """
    move = move and not store.read_only
    objects = _files(store.root / "objects" / "sha256")
    records = _files(store.root / "records")
    object_bytes = sum(map(_size_bytes, objects))
    with ThreadPoolExecutor(num_threads) as pool:
        bad_objects = _find_bad(pool, objects, _object_problem)
        bad_records = _find_bad(pool, records, _record_problem)
    damage = [
        *(_settled(store.root, path, reason, _object_problem, move) for path, reason in bad_objects),
        *(_settled(store.root, path, reason, _record_problem, move) for path, reason in bad_records),
    ]
    found = (*filter(None, damage), *_root_damage(store))
    return FsckReport(len(objects), len(records), object_bytes, found, tuple(_losses(store, found)))


def _files(directory: Path) -> tuple[Path, ...]:
    """Returns every file in the fan-out directories, and everything else next to these directories, sorted."""
    return tuple(sorted(path for path in _leaves(directory) if not path.name.startswith(_NFS_REMOVED)))


def _leaves(directory: Path) -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError):
        for path in directory.iterdir():
            if _FAN_OUT.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                yield from path.iterdir()
            else:
                yield path


def _find_bad(
    pool: ThreadPoolExecutor, paths: Iterable[Path], problem: Problem
) -> tuple[tuple[Path, str], ...]:
    paths = tuple(paths)
    reasons = pool.map(lambda path: problem(path, path), paths)
    return tuple((path, reason) for path, reason in zip(paths, reasons, strict=True) if reason)


def _object_problem(place: Path, path: Path) -> str | None:
    if not (_HEX.fullmatch(path.name) and path.name.startswith(path.parent.name)):
        return "no object has this name"
    try:
        status = place.lstat()
    except FileNotFoundError:
        return None  # Collected or repaired by another process since it was listed.
    fault = find_fault(place, Digest(path.name, status.st_size))
    return fault.reason if fault is not None and fault.state == "corrupt" else None


def _record_problem(place: Path, path: Path) -> str | None:
    key = path.name.removesuffix(".json")
    if not (_HEX.fullmatch(key) and key.startswith(path.parent.name) and path.name.endswith(".json")):
        return "no record has this name"
    try:
        read_record(key, place)
    except RecordError as error:
        return str(error)
    return None


def _settled(root: Path, path: Path, reason: str, problem: Problem, move: bool) -> Damage | None:
    """Moves a damaged file to quarantine. Returns None if it is intact or gone by now."""
    where = os.path.relpath(path, root)
    if not move:
        return Damage(where, reason)
    target = quarantine(root, path, reason)
    if target is None:
        return None
    if problem(target, path) is None:
        release(root, path, target)
        return None
    return Damage(where, reason, os.path.relpath(target, root))


def _root_damage(store: Store) -> Iterator[Damage]:
    for name in store.roots.names():
        try:
            store.roots.get(name)
        except CorruptError as error:
            yield Damage(f"roots/{name}.json", str(error))


def _losses(store: Store, damage: tuple[Damage, ...]) -> Iterator[Loss]:
    bad = {item.path for item in damage}
    for key in store.actions:
        try:
            value = store.actions.records.load(key)
        except RecordError:
            continue
        missing = tuple(
            digest
            for digest in sorted(set(digests_in(value)), key=str)
            if not store.objects.has(digest) or os.path.relpath(object_path(Path(), digest)) in bad
        )
        if value is not None and missing:
            yield Loss(key, value, missing)


def _size_bytes(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.lstat().st_size
    return 0
