"""How much a store holds, and collecting garbage: down to a size, least recently used first, never what a root keeps.

What is removed, in this order:

1. always: objects that no record and no root names (left by writers that died), and what pulls have received in part,
   for none runs;
2. until the store is small enough, whatever was used longest ago: records, each with the objects that nothing else
   names any more; logs; tool caches.

Times of use only decide the order, so a wrong clock costs a rebuild at worst. A record is removed
before its objects, so that a collector that dies leaves objects without a record, and no record without objects.
Builders and pulls share the store's lock and a collector holds it alone, so nothing is removed while they run. A reader
without a lock (on another host, say, whose locks do not reach here) finds an object absent, which is a miss.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from aotgaudi.digest import Digest
from aotgaudi.errors import StoreError
from aotgaudi.store.records import RecordError, Stamp, digests_in
from aotgaudi.store.roots import Root
from aotgaudi.store.scratch import (
    ScratchItem,
    SweepReport,
    list_scratch,
    remove_scratch,
    sweep_temporary_files,
)
from aotgaudi.store.store import Store

KINDS = (
    "objects",
    "records",
    "roots",
    "index",
    "quarantine",
    "tmp",
    "incoming",
    "logs",
    "toolcache",
    "locks",
)
"""Directories that are counted by name; everything else is counted together, as "scratch"."""


@dataclass(frozen=True)
class Usage:
    """Files and bytes of one kind."""

    num_files: int = 0
    size_bytes: int = 0

    def __add__(self, other: Usage) -> Usage:
        """Returns both together."""
        return Usage(self.num_files + other.num_files, self.size_bytes + other.size_bytes)


@dataclass(frozen=True)
class StoreUsage:
    """`oldest_use` and `newest_use` are of records, in seconds since the epoch; None without records.

    `index` says in words what state the index is in.
    """

    kinds: dict[str, Usage]
    root_names: tuple[str, ...]
    index: str
    oldest_use: float | None
    newest_use: float | None

    @property
    def total(self) -> Usage:
        """Everything together."""
        return sum(self.kinds.values(), Usage())


@dataclass(frozen=True)
class StoredRecord:
    """A record as the collector sees it: its key, its file and the objects that it names."""

    key: str
    stamp: Stamp
    objects: frozenset[Digest]

    @property
    def used(self) -> float:
        """When it was last used (seconds)."""
        return self.stamp.used


@dataclass(frozen=True)
class Eviction:
    """A record that goes, and the objects that go with it."""

    record: StoredRecord
    objects: tuple[Digest, ...]


@dataclass(frozen=True)
class Contents:
    """All that a store holds, and what its roots keep. `bad_records` are left to fsck."""

    records: tuple[StoredRecord, ...]
    objects: frozenset[Digest]
    kept_keys: frozenset[str]
    kept_objects: frozenset[Digest]
    bad_records: tuple[str, ...]
    scratch: tuple[ScratchItem, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all objects, records, logs, tool caches and unfinished pulls: what a limit is about."""
        return sum(
            (
                sum(digest.size_bytes for digest in self.objects),
                sum(record.stamp.size_bytes for record in self.records),
                sum(item.size_bytes for item in self.scratch),
            )
        )


@dataclass(frozen=True)
class CollectionPlan:
    """What goes, each in the order in which it goes, and the bytes before and after."""

    orphans: tuple[Digest, ...]
    evicted: tuple[Eviction, ...]
    scratch: tuple[ScratchItem, ...]
    bytes_before: int
    bytes_after: int

    @property
    def objects(self) -> tuple[Digest, ...]:
        """All objects that go."""
        return (*self.orphans, *(digest for eviction in self.evicted for digest in eviction.objects))


@dataclass(frozen=True)
class Collection:
    """What a collector did; `swept` is what it cleared of dead writers' files."""

    plan: CollectionPlan
    kept_bytes: int
    bad_records: tuple[str, ...]
    swept: SweepReport


def measure_store(store: Store) -> StoreUsage:
    """Counts what is in `store`, without its lower layers. What goes away meanwhile is not counted."""
    kinds = dict.fromkeys((*KINDS, "scratch"), Usage())
    for path in store.root.iterdir():
        kind = path.name if path.name in KINDS else "scratch"
        kinds[kind] += _usage(path)
    stamps = [store.actions.records.stamp(key) for key in store.actions]
    uses = [stamp.used for stamp in stamps if stamp is not None]
    return StoreUsage(
        kinds=kinds,
        root_names=store.roots.names(),
        index=store.describe_index(),
        oldest_use=min(uses, default=None),
        newest_use=max(uses, default=None),
    )


def read_contents(store: Store, kept: Iterable[Root] = ()) -> Contents:
    """Reads every record and root, to which those of `kept` are added.

    Raises CorruptError for a root that cannot be read, and StoreError.
    """
    records, bad = [], []
    for key in store.actions:
        stamp = store.actions.records.stamp(key)
        try:
            value = store.actions.records.load(key)
        except RecordError:
            value = None
        if value is None or stamp is None:
            bad.append(key)
        else:
            records.append(StoredRecord(key, stamp, frozenset(digests_in(value))))
    kept_keys: set[str] = set()
    kept_objects: set[Digest] = set()
    for root in (*store.roots, *kept):
        kept_keys |= root.keys
        kept_objects |= root.objects
    for record in records:
        if record.key in kept_keys:
            kept_objects |= record.objects
    return Contents(
        tuple(records),
        frozenset(store.objects.digests()),
        frozenset(kept_keys),
        frozenset(kept_objects),
        tuple(bad),
        list_scratch(store.root),
    )


def plan_collection(contents: Contents, max_bytes: int) -> CollectionPlan:
    """Returns what must go for the store to hold at most `max_bytes`, as far as the roots allow."""
    users = Counter(digest for record in contents.records for digest in record.objects)
    loose = contents.objects - contents.kept_objects
    orphans = tuple(sorted(loose - users.keys(), key=str))
    scratch = [item for item in contents.scratch if item.is_unfinished]
    left = contents.total_bytes - sum(digest.size_bytes for digest in orphans)
    left -= sum(item.size_bytes for item in scratch)
    evicted = []
    for item in _by_last_use(contents, frozenset(scratch)):
        if left <= max_bytes:
            break
        if isinstance(item, ScratchItem):
            scratch.append(item)
            left -= item.size_bytes
            continue
        users.subtract(item.objects)
        freed = tuple(sorted((digest for digest in item.objects & loose if not users[digest]), key=str))
        left -= item.stamp.size_bytes + sum(digest.size_bytes for digest in freed)
        evicted.append(Eviction(item, freed))
    return CollectionPlan(orphans, tuple(evicted), tuple(scratch), contents.total_bytes, left)


def collect(store: Store, max_bytes: int, *, dry_run: bool = False) -> Collection:
    """Shrinks `store` to at most `max_bytes`, as far as its roots allow.

    With `dry_run` nothing is removed, and builders may be at work.

    Raises:
        StoreError: somebody builds or seals, the file system has no locks, or a file cannot be removed.
        CorruptError: a root cannot be read; nothing is removed then.
    """
    if dry_run:
        contents = read_contents(store)
        return _outcome(contents, plan_collection(contents, max_bytes), SweepReport())
    found = collect_unless_used(store, max_bytes)
    if found is None:
        raise StoreError(f"store at {store.root} is in use: collect when no build or seal runs")
    return found


def collect_unless_used(store: Store, max_bytes: int, kept: Iterable[Root] = ()) -> Collection | None:
    """As `collect`, but returns None, and does nothing, while somebody builds or seals. `kept` are further roots."""
    with store.locks.exclusive() as is_alone:
        if not is_alone:
            return None
        contents = read_contents(store, kept)
        plan = plan_collection(contents, max_bytes)
        _remove(store, plan)
        swept = sweep_temporary_files(store.root)
        store.locks.forget_units()
    return _outcome(contents, plan, swept)


def _by_last_use(contents: Contents, gone: frozenset[ScratchItem]) -> Iterable[StoredRecord | ScratchItem]:
    items: list[StoredRecord | ScratchItem] = [item for item in contents.scratch if item not in gone]
    items += (record for record in contents.records if record.key not in contents.kept_keys)
    return sorted(items, key=lambda item: (item.used, _name(item)))


def _name(item: StoredRecord | ScratchItem) -> str:
    return item.path.name if isinstance(item, ScratchItem) else item.key


def _remove(store: Store, plan: CollectionPlan) -> None:
    for item in plan.scratch:
        remove_scratch(item)
    for digest in plan.orphans:
        store.objects.discard(digest)
    for eviction in plan.evicted:
        store.actions.discard(eviction.record.key)
        for digest in eviction.objects:
            store.objects.discard(digest)


def _outcome(contents: Contents, plan: CollectionPlan, swept: SweepReport) -> Collection:
    kept = sum(digest.size_bytes for digest in contents.kept_objects & contents.objects)
    kept += sum(r.stamp.size_bytes for r in contents.records if r.key in contents.kept_keys)
    return Collection(plan, kept, contents.bad_records, swept)


def _usage(path: Path) -> Usage:
    if not path.is_dir() or path.is_symlink():
        return _file_usage(path)
    usage = Usage()
    for parent, _, names in os.walk(path):
        for name in names:
            usage += _file_usage(Path(parent, name))
    return usage


def _file_usage(path: Path) -> Usage:
    with contextlib.suppress(FileNotFoundError):
        return Usage(1, path.lstat().st_size)
    return Usage()
