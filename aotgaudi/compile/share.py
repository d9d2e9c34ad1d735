"""Shares what a manifest needs between stores, through a remote: records, and the objects that they name.

A pull asks for exactly the keys that a build would look up, and takes what it finds. A cache may lack anything, and damaged
data is a miss, with a warning. Anyone who may write to a remote decides what code the bundles made from it will run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from aotgaudi.backends.base import Target
from aotgaudi.compile.keys import (
    BuiltRow,
    ModelCheckRow,
    ProgramKeys,
    ProgramRow,
    UnitRow,
    read_model_check,
    read_programs,
    read_units,
    record,
    require_key_parts,
)
from aotgaudi.compile.plan import Plan, check_key_of
from aotgaudi.digest import Digest
from aotgaudi.entries import Entry
from aotgaudi.errors import CorruptError, MissingObjectError, first_line
from aotgaudi.share.remote import Remote
from aotgaudi.share.transfer import Conduct, Sources, in_threads, receive, send
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.store.cas import object_path
from aotgaudi.store.records import RecordError, digests_in, dump_record, load_record
from aotgaudi.store.scratch import INCOMING_NAME
from aotgaudi.store.store import Store

R = TypeVar("R", ProgramRow, UnitRow, ModelCheckRow)


@dataclass(frozen=True)
class Share:
    """How much of a manifest was sent or received. `num_wanted` is the number of records that were looked for."""

    num_wanted: int
    num_records: int
    num_objects: int
    size_bytes: int


def push_plan(
    plan: Plan, store: Store, remote: Remote, conduct: Conduct, *, overwrite: bool = False
) -> Share:
    """Uploads what `store` has of `plan` and `remote` lacks: objects first, then records.

    A record of the remote stays if its objects exist. Raises CorruptError for a damaged object of the store, RemoteError,
    StoreError, and MissingPackageError if this machine lacks a package without which nothing can have been built.
    """
    require_key_parts()
    rows: dict[str, BuiltRow] = {state.key.hex: state.row for state in plan.programs if state.row}
    if plan.model_check is not None and plan.model_check.row is not None:
        rows[plan.model_check.key.hex] = plan.model_check.row
    return push_rows(rows | plan.units, store, remote, conduct, overwrite=overwrite)


def push_rows(
    rows: Mapping[str, BuiltRow], store: Store, remote: Remote, conduct: Conduct, *, overwrite: bool = False
) -> Share:
    """Uploads `rows` of `store`, given by key. Works and raises like `push_plan`."""
    digests = {digest for row in rows.values() for digest in row.digests()}
    files = {digest: store.objects.path(digest) for digest in digests}
    num_objects, size_bytes = send(remote, files, conduct, overwrite=overwrite)

    def send_record(item: tuple[str, BuiltRow]) -> bool:
        key, row = item
        data = dump_record(key, row.model_dump(mode="json"))
        if not overwrite and conduct.retry.call(lambda: _is_answered(remote, key, data)):
            return False
        conduct.retry.call(lambda: remote.put_record(key, data, tuple(dict.fromkeys(row.digests()))))
        return True

    sent = in_threads(send_record, rows.items(), conduct.num_threads)
    return Share(len(rows), sum(sent), num_objects, size_bytes)


def pull_entries(
    entries: Iterable[Entry], spec: BuildSpec, target: Target, store: Store, sources: Sources
) -> Share:
    """Brings into `store` what it lacks for `entries` and `sources` have: programs first, then their units.

    Raises RemoteError if no remote can be used, StoreError, and MissingPackageError if a package is missing here without
    which no build can have these keys.
    """
    require_key_parts()
    puller = _Puller(store, sources)
    keys = ProgramKeys(spec, target)
    listed = tuple(entries)
    program_keys = dict.fromkeys(keys.hex_of(entry) for entry in listed)
    programs = read_programs(store, program_keys)
    wanted = [key for key in program_keys if key not in programs]
    num_programs = puller.pull(wanted, ProgramRow.model_validate)
    rows = read_programs(store, program_keys).values()
    unit_keys = dict.fromkeys(key for row in rows for key in row.units)
    units = read_units(store, unit_keys)
    missing = [key for key in unit_keys if key not in units]
    num_units = puller.pull(missing, UnitRow.model_validate)
    check = check_key_of(listed, spec, target)
    unchecked = [] if check is None or read_model_check(store, check.hex) else [check.hex]
    num_checks = puller.pull(unchecked, ModelCheckRow.model_validate)
    sources.require_usable()
    return Share(
        len(wanted) + len(missing) + len(unchecked),
        num_programs + num_units + num_checks,
        len(puller.received),
        puller.received_bytes,
    )


def pull_row(key: str, parse: Callable[[dict[str, object]], R], store: Store, sources: Sources) -> bool:
    """Brings the record of `key` and its objects into `store`. Returns False if no remote has it.

    Raises like `pull_entries`.
    """
    is_there = bool(_Puller(store, sources).pull((key,), parse))
    sources.require_usable()
    return is_there


def receive_object(digest: Digest, store: Store, sources: Sources) -> bool:
    """Brings one object into `store`. Returns False if it was there. Raises StoreError, and like `Sources.fill`."""
    if store.objects.has(digest):
        return False
    incoming = store.root / INCOMING_NAME / digest.sha256
    path = object_path(store.root, digest)
    return receive(digest, incoming, path, lambda file: sources.fill(digest, file))


class _Puller:
    """Receives records and their objects into a store."""

    def __init__(self, store: Store, sources: Sources) -> None:
        self._store = store
        self._sources = sources
        self.received: set[Digest] = set()

    @property
    def received_bytes(self) -> int:
        return sum(digest.size_bytes for digest in self.received)

    def pull(self, keys: Iterable[str], parse: Callable[[dict[str, object]], R]) -> int:
        """Receives `keys`. Returns how many of them a remote had."""
        return sum(self._sources.each(lambda key: self._pull_one(key, parse), keys))

    def _pull_one(self, key: str, parse: Callable[[dict[str, object]], R]) -> bool:
        for remote in self._sources.usable:
            data = self._sources.ask(remote, partial(remote.get_record, key))
            if data is None:
                continue
            try:
                row = parse(load_record(key, data))
                for digest in dict.fromkeys(row.digests()):
                    if receive_object(digest, self._store, self._sources):
                        self.received.add(digest)
            except MissingObjectError:
                continue  # A record whose objects are gone is a miss.
            except (RecordError, ValueError, CorruptError) as error:
                self._sources.conduct.warn(
                    f"{remote.label}: record {key:.12}... counts for nothing: {first_line(error)}"
                )
                continue
            record(self._store, key, row)
            return True
        return False


def _is_answered(remote: Remote, key: str, data: bytes) -> bool:
    """Whether the remote's record suffices: it is the same, or it is sound and all its objects exist."""
    found = remote.get_record(key)
    if found is None or found == data:
        return found is not None
    try:
        value = load_record(key, found)
    except RecordError:
        return False
    return all(map(remote.has, digests_in(value)))
