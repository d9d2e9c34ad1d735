"""A manifest minus its hits: a plan says what would be traced and compiled, and how long that may take.

Imports no torch: a build with nothing to do answers from the store's records alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

from aotgaudi.backends.base import Target
from aotgaudi.compile.estimates import Estimates, read_estimates
from aotgaudi.compile.keys import ProgramKeys
from aotgaudi.compile.records import ProgramRow, UnitRow, read_programs, read_units
from aotgaudi.digest import Digest, Key
from aotgaudi.entries import Entry
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.store.roots import Root
from aotgaudi.store.store import Store


@dataclass(frozen=True)
class ProgramState:
    """One program: its key, the entries that it serves, and what the store knows of it (None: not traced)."""

    key: Key
    entries: tuple[Entry, ...]
    row: ProgramRow | None


@dataclass(frozen=True)
class Plan:
    """What is there and what is not, for every program of a manifest."""

    target: Target
    programs: tuple[ProgramState, ...]
    units: dict[str, UnitRow]
    """Units that have an artifact, by key."""

    estimates: Estimates = field(default_factory=Estimates)
    """How long units may take. If nothing is missing, earlier records were not read."""

    @property
    def untraced(self) -> tuple[ProgramState, ...]:
        """Programs that must be traced before it is known which units they need."""
        return tuple(state for state in self.programs if state.row is None)

    @property
    def missing_units(self) -> dict[str, str]:
        """Unit key -> label of the known units without an artifact."""
        return {
            key: source.label
            for state in self.programs
            if state.row
            for key, source in state.row.units.items()
            if key not in self.units
        }

    @property
    def is_complete(self) -> bool:
        """True when there is nothing to do."""
        return not self.untraced and not self.missing_units

    def digests(self) -> Iterator[Digest]:
        """Yields every object that was found: programs, texts, constants and artifacts, some of them twice."""
        programs = (state.row.digests() for state in self.programs if state.row)
        yield from chain(*programs, *(row.digests() for row in self.units.values()))

    def as_root(self, name: str) -> Root:
        """Returns the root that keeps all that was found, also the texts, so that nothing is traced again.

        Raises ValueError for what is no name of a root.
        """
        programs = (state.key.hex for state in self.programs if state.row is not None)
        return Root(name=name, keys=frozenset((*programs, *self.units)), objects=frozenset(self.digests()))

    def estimate_seconds(self, workers: int) -> float:
        """Returns a wall-clock estimate. What an untraced program needs is guessed from its kind of entry."""
        known = (self.estimates.of_unit(label) for label in self.missing_units.values())
        guessed = (self.estimates.of_entry(state.entries[0]) for state in self.untraced)
        return sum(part.seconds for work in chain(known, guessed) for part in work) / max(1, workers)


def make_plan(entries: Iterable[Entry], spec: BuildSpec, target: Target, store: Store) -> Plan:
    """Looks every entry up. Entries with the same program key share a program."""
    keys = ProgramKeys(spec, target)
    groups = _by_program(entries, keys)
    rows = read_programs(store, groups)
    programs = [
        ProgramState(keys.of(members[0]), tuple(members), rows.get(key)) for key, members in groups.items()
    ]
    units = read_units(store, dict.fromkeys(key for row in rows.values() for key in row.units))
    plan = Plan(target, tuple(programs), units)
    return plan if plan.is_complete else replace(plan, estimates=read_estimates(store, target))


def is_known_complete(entries: Iterable[Entry], spec: BuildSpec, target: Target, store: Store) -> bool:
    """Whether a plan for `entries` was complete before, and nothing that it found has gone since.

    It answers for thousands of entries without reading a record. False says nothing: make a plan.
    """
    return store.remembers(tuple(_by_program(entries, ProgramKeys(spec, target))))


def remember_complete(plan: Plan, store: Store) -> None:
    """Has `is_known_complete` remember `plan` if it is complete, and notes that what it found was used."""
    if not plan.is_complete:
        return
    keys = [state.key.hex for state in plan.programs]
    store.remember(keys, plan.units, plan.digests())


def _by_program(entries: Iterable[Entry], keys: ProgramKeys) -> dict[str, list[Entry]]:
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(keys.hex_of(entry), []).append(entry)
    return groups
