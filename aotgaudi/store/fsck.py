"""Checks a whole store: hashes every object and record again, and removes damaged ones, so that builds make them again.

It needs no lock, so builders may run meanwhile. A file is checked again just before it is removed. Should a builder mend it
in between, the next build mends it once more.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError
from aotgaudi.store.cas import discard_damaged, find_fault, object_path
from aotgaudi.store.records import RecordError, digests_in, read_record
from aotgaudi.store.store import Store

_HEX = re.compile(r"[0-9a-f]{64}")
_FAN_OUT = re.compile(r"[0-9a-f]{2}")
_NFS_REMOVED = ".nfs"
"""NFS gives this prefix to a file that was removed while open. The file disappears by itself."""

_FOREIGN = "no object or record has this name"

Problem = Callable[[Path], "str | None"]
"""Returns what is wrong with a file; None if it is intact or gone."""


@dataclass(frozen=True)
class Damage:
    """A file whose content does not match its name, by its path relative to the store.

    Roots, and directories whose names we never give, are not removed.
    """

    path: str
    reason: str
    is_removed: bool = False


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


def check_store(store: Store, num_threads: int = 1, *, remove: bool = True) -> FsckReport:
    """Hashes everything in `store` (not in its lower layers) again, with `num_threads` threads, and reports the damage.

    Damaged files are removed unless `remove` is False or the store is read-only.

    Raises StoreError if the store cannot be read or a damaged file cannot be removed.
    """
    remove = remove and not store.read_only
    objects = _files(store.root / "objects" / "sha256")
    records = _files(store.root / "records")
    object_bytes = sum(map(_size_bytes, objects))
    with ThreadPoolExecutor(num_threads) as pool:
        bad = [*_find_bad(pool, objects, _object_problem), *_find_bad(pool, records, _record_problem)]
    settled = (_settled(store.root, path, problem, remove) for path, problem in bad)
    found = (*filter(None, settled), *_root_damage(store))
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
    pool: ThreadPoolExecutor, paths: tuple[Path, ...], problem: Problem
) -> list[tuple[Path, Problem]]:
    return [(path, problem) for path, reason in zip(paths, pool.map(problem, paths), strict=True) if reason]


def _object_problem(path: Path) -> str | None:
    if not (_HEX.fullmatch(path.name) and path.name.startswith(path.parent.name)):
        return _FOREIGN
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None  # Collected or repaired by another process since it was listed.
    fault = find_fault(path, Digest(path.name, status.st_size))
    return fault.reason if fault is not None and fault.state == "corrupt" else None


def _record_problem(path: Path) -> str | None:
    key = path.name.removesuffix(".json")
    if not (_HEX.fullmatch(key) and key.startswith(path.parent.name) and path.name.endswith(".json")):
        return _FOREIGN
    try:
        read_record(key, path)
    except RecordError as error:
        return str(error)
    return None


def _settled(root: Path, path: Path, problem: Problem, remove: bool) -> Damage | None:
    """Removes a damaged file. Returns None if it is intact or gone by now."""
    reason = problem(path)
    if reason == _FOREIGN and path.is_dir() and not path.is_symlink():
        remove = False
    if reason is None or (remove and not discard_damaged(path, reason)):
        return None
    return Damage(os.path.relpath(path, root), reason, remove)


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
