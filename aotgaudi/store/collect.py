"""Collecting garbage: down to a size, least recently used first, never what a root keeps.

What is removed, in this order, until the store is small enough (the first is always removed):

1. objects that no record and no root names: left by writers that died;
2. records, the one used longest ago first, each with the objects that nothing else names any more.

The order decides only what goes first, so that a clock that is wrong costs a rebuild at worst. A record is removed
before its objects, so that a collector that dies leaves objects without a record, and no record without objects.
Builders hold the store's lock shared and a collector holds it alone: nothing goes away under a build. Who reads
without a lock (on another host whose locks do not reach here) finds an object absent, which is a miss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from aotgaudi.digest import Digest
from aotgaudi.errors import StoreError
from aotgaudi.store.records import RecordError, Stamp
from aotgaudi.store.references import digests_in
from aotgaudi.store.store import Store
from aotgaudi.store.sweep import SweepReport, sweep_temporary_files


@dataclass(frozen=True)
class StoredRecord:
    """A record as the collector sees it: its key, its file and the objects that it names."""

    key: str
    stamp: Stamp
    objects: frozenset[Digest]


@dataclass(frozen=True)
class Contents:
    """All that a store holds, and what its roots keep. `bad_records` are left to fsck."""

    records: tuple[StoredRecord, ...]
    objects: frozenset[Digest]
    kept_keys: frozenset[str]
    kept_objects: frozenset[Digest]
    bad_records: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all objects and records."""
        return sum(o.size_bytes for o in self.objects) + sum(r.stamp.size_bytes for r in self.records)


@dataclass(frozen=True)
class CollectionPlan:
    """What goes, in the order in which it goes, and the bytes before and after."""

    orphans: tuple[Digest, ...]
    evicted: tuple[tuple[StoredRecord, tuple[Digest, ...]], ...]
    bytes_before: int
    bytes_after: int

    @property
    def objects(self) -> tuple[Digest, ...]:
        """All objects that go."""
        return (*self.orphans, *(digest for _, digests in self.evicted for digest in digests))


@dataclass(frozen=True)
class Collection:
    """What a collector did; `swept` is what it cleared of dead writers' files."""

    plan: CollectionPlan
    kept_bytes: int
    bad_records: tuple[str, ...]
    swept: SweepReport


def read_contents(store: Store) -> Contents:
    """Reads every record and root. Raises CorruptError for a root that cannot be read, and StoreError."""
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
    for root in store.roots:
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
    )


def plan_collection(contents: Contents, max_bytes: int) -> CollectionPlan:
    """Returns what must go for the store to hold at most `max_bytes`, as far as the roots allow."""
    users = Counter(digest for record in contents.records for digest in record.objects)
    there = contents.objects
    orphans = sorted((there - contents.kept_objects) - users.keys(), key=str)
    left = before = contents.total_bytes
    left -= sum(digest.size_bytes for digest in orphans)
    evicted = []
    for record in _by_last_use(contents):
        if left <= max_bytes:
            break
        users.subtract(record.objects)
        freed = tuple(
            sorted((d for d in record.objects & there - contents.kept_objects if not users[d]), key=str)
        )
        left -= record.stamp.size_bytes + sum(digest.size_bytes for digest in freed)
        evicted.append((record, freed))
    return CollectionPlan(tuple(orphans), tuple(evicted), before, left)


def collect(store: Store, max_bytes: int, *, dry_run: bool = False) -> Collection:
    """Shrinks `store` to at most `max_bytes` of objects and records, as far as its roots allow.

    With `dry_run` nothing is removed, and builders may be at work.

    Raises:
        StoreError: somebody builds or seals, the file system has no locks, or a file cannot be removed.
        CorruptError: a root cannot be read; nothing is removed then.
    """
    if dry_run:
        contents = read_contents(store)
        return _outcome(contents, plan_collection(contents, max_bytes), SweepReport())
    with store.locks.exclusive() as is_alone:
        if not is_alone:
            raise StoreError(f"store at {store.root} is in use: collect when no build or seal runs")
        contents = read_contents(store)
        plan = plan_collection(contents, max_bytes)
        _remove(store, plan)
        swept = sweep_temporary_files(store.root)
        store.locks.forget_units()
    return _outcome(contents, plan, swept)


def _by_last_use(contents: Contents) -> Iterable[StoredRecord]:
    loose = (record for record in contents.records if record.key not in contents.kept_keys)
    return sorted(loose, key=lambda record: (record.stamp.used, record.key))


def _remove(store: Store, plan: CollectionPlan) -> None:
    for digest in plan.orphans:
        store.objects.discard(digest)
    for record, digests in plan.evicted:
        store.actions.discard(record.key)
        for digest in digests:
            store.objects.discard(digest)


def _outcome(contents: Contents, plan: CollectionPlan, swept: SweepReport) -> Collection:
    kept = sum(digest.size_bytes for digest in contents.kept_objects & contents.objects)
    kept += sum(r.stamp.size_bytes for r in contents.records if r.key in contents.kept_keys)
    return Collection(plan, kept, contents.bad_records, swept)
