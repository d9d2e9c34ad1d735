"""Measures a store, and collects garbage: shrinks the store to a size, least recently used first. Roots are kept.

A collector removes, in this order:

1. Always: objects that neither a record nor a root names (leftovers of dead writers).
2. Until the store is small enough, least recently used first: records, each with the objects that no other record names,
   logs, and tool caches.

Times of use decide only the order, so at worst a wrong clock costs a rebuild. A record is removed before its objects, so
that a collector that dies leaves objects without a record, never a record without objects. Builders and pulls share the
store's lock, and a collector holds it exclusively, so nothing is removed while they run. For a reader without the lock (for
example on another host that does not see our locks), a removed object is absent, which is a miss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import itemgetter

from aotgaudi.digest import Digest
from aotgaudi.errors import StoreError
from aotgaudi.store.cas import remove
from aotgaudi.store.records import RecordError, Stamp, digests_in
from aotgaudi.store.scratch import ScratchItem, Usage, list_scratch, sweep_temporary_files, usage_of
from aotgaudi.store.store import Root, Store

KINDS = (
    "objects",
    "records",
    "roots",
    "index",
    "tmp",
    "logs",
    "toolcache",
    "locks",
)
"""Directories that are counted by name. Everything else is counted together as "scratch"."""


@dataclass(frozen=True)
class StoreUsage:
    """What a store holds. `oldest_use` and `newest_use` of records are seconds since the epoch; None without records.

    `index` describes the state of the index in words.
    """

    kinds: dict[str, Usage]
    root_names: tuple[str, ...]
    index: str
    oldest_use: float | None
    newest_use: float | None

    @property
    def total(self) -> Usage:
        """The sum over all kinds."""
        return sum(self.kinds.values(), Usage())


@dataclass(frozen=True)
class StoredRecord:
    """A record: its key, its file, and the objects that it names."""

    key: str
    stamp: Stamp
    objects: frozenset[Digest]


@dataclass(frozen=True)
class Eviction:
    """A record to be removed, and the objects to be removed with it."""

    record: StoredRecord
    objects: tuple[Digest, ...]


@dataclass(frozen=True)
class Contents:
    """The contents of a store, and what its roots keep. `bad_records` are left for fsck."""

    records: tuple[StoredRecord, ...]
    objects: frozenset[Digest]
    kept_keys: frozenset[str]
    kept_objects: frozenset[Digest]
    bad_records: tuple[str, ...]
    scratch: tuple[ScratchItem, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all objects, records, logs and tool caches, which a limit applies to."""
        return sum(
            (
                sum(digest.size_bytes for digest in self.objects),
                sum(record.stamp.size_bytes for record in self.records),
                sum(item.size_bytes for item in self.scratch),
            )
        )


@dataclass(frozen=True)
class CollectionPlan:
    """What to remove, in order, and the bytes before, after, and of what the roots keep.

    `bad_records` are left for fsck. `swept` counts the removed files of dead writers.
    """

    orphans: tuple[Digest, ...]
    evicted: tuple[Eviction, ...]
    scratch: tuple[ScratchItem, ...]
    bytes_before: int
    bytes_after: int
    kept_bytes: int
    bad_records: tuple[str, ...]
    swept: int = 0

    @property
    def objects(self) -> tuple[Digest, ...]:
        """All objects to remove."""
        return (*self.orphans, *(digest for eviction in self.evicted for digest in eviction.objects))


def measure_store(store: Store) -> StoreUsage:
    """Counts the contents of `store`, without its lower layers. Files that disappear meanwhile are not counted."""
    kinds = dict.fromkeys((*KINDS, "scratch"), Usage())
    for path in store.root.iterdir() if store.root.is_dir() else ():
        kind = path.name if path.name in KINDS else "scratch"
        kinds[kind] += usage_of(path)
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
    """Reads every record and root, and adds the roots `kept`. Raises CorruptError for an unreadable root, and StoreError."""
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
    """Returns what to remove so that the store holds at most `max_bytes`, as far as the roots allow."""
    users = Counter(digest for record in contents.records for digest in record.objects)
    loose = contents.objects - contents.kept_objects
    orphans = tuple(sorted(loose - users.keys(), key=str))
    scratch: list[ScratchItem] = []
    left = contents.total_bytes - sum(digest.size_bytes for digest in orphans)
    evicted = []
    for item in _by_last_use(contents):
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
    kept_bytes = sum(digest.size_bytes for digest in contents.kept_objects & contents.objects)
    kept_bytes += sum(r.stamp.size_bytes for r in contents.records if r.key in contents.kept_keys)
    return CollectionPlan(
        orphans,
        tuple(evicted),
        tuple(scratch),
        contents.total_bytes,
        left,
        kept_bytes,
        contents.bad_records,
    )


def collect(store: Store, max_bytes: int, *, dry_run: bool = False) -> CollectionPlan:
    """Shrinks `store` to at most `max_bytes`, as far as its roots allow. Returns what was removed.

    With `dry_run`, nothing is removed, and builders may run meanwhile.

    Raises:
        StoreError: A build or a seal is running, the file system has no locks, or a file cannot be removed.
        CorruptError: A root cannot be read. Then nothing is removed.
    """
    if dry_run:
        return plan_collection(read_contents(store), max_bytes)
    found = collect_unless_used(store, max_bytes)
    if found is None:
        raise StoreError(f"store at {store.root} is in use: collect when no build or seal runs")
    return found


def collect_unless_used(store: Store, max_bytes: int, kept: Iterable[Root] = ()) -> CollectionPlan | None:
    """Collects as `collect` does, but does nothing and returns None while a build or a seal runs. `kept` are more roots."""
    with store.locks.exclusive() as is_alone:
        if not is_alone:
            return None
        plan = plan_collection(read_contents(store, kept), max_bytes)
        _remove(store, plan)
        swept = sweep_temporary_files(store.root)
        store.locks.forget_units()
    return replace(plan, swept=swept)


def _by_last_use(contents: Contents) -> Iterable[StoredRecord | ScratchItem]:
    items: list[tuple[float, str, StoredRecord | ScratchItem]]
    items = [(item.used, item.path.name, item) for item in contents.scratch]
    items += [(row.stamp.used, row.key, row) for row in contents.records if row.key not in contents.kept_keys]
    return (item for *_, item in sorted(items, key=itemgetter(0, 1)))


def _remove(store: Store, plan: CollectionPlan) -> None:
    for item in plan.scratch:
        remove(item.path)
    for digest in plan.orphans:
        store.objects.discard(digest)
    for eviction in plan.evicted:
        store.actions.discard(eviction.record.key)
        for digest in eviction.objects:
            store.objects.discard(digest)
