"""A plan: which programs and units of a manifest the store lacks, and how long building them may take.

Imports no torch: if a build has nothing to do, the store's records alone answer.

The estimate for a unit is its time on record, else the mean of its kind, else a value from a table. It only decides the
order of units and the displayed time, which a run corrects by the times of its jobs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from types import MappingProxyType

from aotgaudi.backends.base import Target
from aotgaudi.compile.keys import (
    CHECKED_BACKENDS,
    BuiltRow,
    ModelCheckRow,
    ProgramKeys,
    ProgramRow,
    UnitRow,
    model_check_key,
    read_rows,
)
from aotgaudi.digest import Digest, Key
from aotgaudi.entries import DecodeEntry, Entry, PromptEntry
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.store.store import Root, Store

UNIT_SECONDS: Mapping[str, float] = MappingProxyType(
    {
        "layer": 7.0,
        "embedding": 5.0,
        "head": 5.0,
        "sampler": 6.0,
        "swap": 4.0,
        "defrag": 4.0,
        "hc_pre": 8.0,
        "mhc": 8.0,
    }
)
"""Compile seconds of a unit if none of its kind is on record (measured: docs/benchmarks.md)."""

OTHER_SECONDS = 6.0
TRACE_SECONDS = 4.0
MODEL_CHECK_SECONDS = 5.0
SMALL_TRACE_SECONDS = 0.5
_UNITS_A_STEP = ("embedding", "layer", "head")

_MOST_RECORDS = 1000
"""The most records that estimates are read from; 300 take a hundredth of a second."""


@dataclass(frozen=True, slots=True)
class Work:
    """The estimated seconds of a job, and of the jobs that should follow from it (a trace leads to units)."""

    seconds: float
    later_seconds: float = 0.0


@dataclass(frozen=True)
class Estimates:
    """Compile seconds of units on one worker, means by label and by kind (the first word of a label)."""

    by_label: Mapping[str, float] = field(default_factory=dict)
    by_kind: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[tuple[str, float]]) -> Estimates:
        """Makes estimates from the labels and seconds of earlier compiles."""
        labels, kinds = defaultdict(list), defaultdict(list)
        for label, seconds in rows:
            labels[label].append(seconds)
            kinds[_kind(label)].append(seconds)
        return cls(*({name: fmean(found) for name, found in group.items()} for group in (labels, kinds)))

    def unit_seconds(self, label: str) -> float:
        """Returns the expected seconds of a unit with this label, at least 0."""
        kind = _kind(label)
        unseen = self.by_kind.get(kind, UNIT_SECONDS.get(kind, OTHER_SECONDS))
        return self.by_label.get(label, unseen)

    def of_entry(self, entry: Entry) -> Work:
        """Returns the expected work for an untraced entry: the trace, and the units that it may produce."""
        is_step = entry.kind in ("prompt", "decode")
        kinds = _UNITS_A_STEP if is_step else (entry.kind,)
        units = sum(self.unit_seconds(f"{kind} {entry}") for kind in kinds)
        return Work(TRACE_SECONDS if is_step else SMALL_TRACE_SECONDS, units)


def read_estimates(store: Store, target: Target) -> Estimates:
    """Returns estimates from at most `_MOST_RECORDS` of the store's records for `target`'s backend and machine."""
    keys = tuple(store.actions)
    chosen = keys[:: max(1, math.ceil(len(keys) / _MOST_RECORDS))]
    wanted = {name: value for name, value in target.components() if name in _DECISIVE}
    rows = []
    for value in store.actions.get_many(chosen).values():
        label, seconds, components = (value.get(n) for n in ("label", "compile_seconds", "components"))
        if not isinstance(label, str) or not isinstance(seconds, (int, float)) or seconds < 0:
            continue
        if isinstance(components, dict) and wanted.items() <= components.items():
            rows.append((label, float(seconds)))
    return Estimates.of(rows)


_DECISIVE = frozenset({"target.backend", "target.machine"})
"""Components that must be equal for one compile time to predict another. A new torch changes the times little."""


class TimeLeft:
    """Predicts how long the rest of a run takes, by the estimates and how this run's jobs compare with theirs."""

    def __init__(self) -> None:
        self._measured = self._estimated = _PRIOR_SECONDS

    def learn(self, work: Work, seconds: float) -> None:
        """Records the wall-clock seconds of a job of this run."""
        self._measured += seconds
        self._estimated += work.seconds

    def seconds(
        self, *, waiting: Sequence[Work], running: Sequence[tuple[Work, float]], num_workers: int
    ) -> float:
        """Returns the seconds that are left on `num_workers`. `running` has each job with the seconds since it began."""
        ratio = self._measured / self._estimated
        left = sum(ratio * (work.seconds + work.later_seconds) for work in waiting)
        left += sum(
            max(0.0, ratio * work.seconds - elapsed) + ratio * work.later_seconds for work, elapsed in running
        )
        return left / max(1, min(num_workers, len(waiting) + len(running)))


_PRIOR_SECONDS = 5.0
"""With this weight the estimates count before any job has ended."""


def _kind(label: str) -> str:
    return label.split(" ", 1)[0]


@dataclass(frozen=True)
class ProgramState:
    """One program: its key, the entries that it serves, and its record in the store (None: not traced).

    `n_splits`: the number of partial sums of a step's hyper-connections; 1 without hyper-connections.
    """

    key: Key
    entries: tuple[Entry, ...]
    row: ProgramRow | None
    n_splits: int = 1


@dataclass(frozen=True)
class ModelCheckState:
    """The comparison of the graphs with the model: its key, and its record in the store (None: not compared)."""

    key: Key
    row: ModelCheckRow | None


@dataclass(frozen=True)
class Plan:
    """Which programs and units of a manifest the store has. `model_check` is None where there is nothing to compare."""

    target: Target
    programs: tuple[ProgramState, ...]
    units: dict[str, UnitRow]
    """Units that have an artifact, by key."""

    estimates: Estimates = field(default_factory=Estimates)
    """How long units may take. Empty if nothing is missing."""

    model_check: ModelCheckState | None = None

    @property
    def untraced(self) -> tuple[ProgramState, ...]:
        """Programs whose units are unknown until they are traced."""
        return tuple(state for state in self.programs if state.row is None)

    @property
    def missing_units(self) -> dict[str, str]:
        """Labels of the known units without an artifact, by key."""
        return {
            key: source.label
            for state in self.programs
            if state.row
            for key, source in state.row.units.items()
            if key not in self.units
        }

    @property
    def complete(self) -> Iterator[tuple[ProgramState, ProgramRow]]:
        """Yields programs whose units are all there, with their records."""
        for state in self.programs:
            if state.row is not None and state.row.units.keys() <= self.units.keys():
                yield state, state.row

    @property
    def is_complete(self) -> bool:
        """Whether nothing is to be traced or compiled."""
        return not self.untraced and not self.missing_units

    @property
    def is_checked(self) -> bool:
        """Whether the graphs were compared with the model, if they have one."""
        return self.model_check is None or self.model_check.row is not None

    @property
    def rows(self) -> dict[str, BuiltRow]:
        """The records that were found, by key."""
        rows: dict[str, BuiltRow] = {state.key.hex: state.row for state in self.programs if state.row}
        if self.model_check is not None and self.model_check.row is not None:
            rows[self.model_check.key.hex] = self.model_check.row
        return rows | self.units

    def digests(self) -> Iterator[Digest]:
        """Yields every object that was found (programs, texts, constants and artifacts), possibly more than once."""
        for row in self.rows.values():
            yield from row.digests()

    def as_root(self, name: str) -> Root:
        """Returns the root that keeps everything that was found, including texts, so that nothing is traced again.

        Raises ValueError for an invalid name.
        """
        return Root(name=name, keys=frozenset(self.rows), objects=frozenset(self.digests()))

    def estimate_seconds(self, workers: int) -> float:
        """Returns a wall-clock estimate. The work of an untraced program is guessed from its kind of entry."""
        seconds = sum(map(self.estimates.unit_seconds, self.missing_units.values()))
        for state in self.untraced:
            work = self.estimates.of_entry(state.entries[0])
            seconds += work.seconds + work.later_seconds
        return seconds / max(1, workers)


def make_plan(entries: Iterable[Entry], spec: BuildSpec, target: Target, store: Store) -> Plan:
    """Looks up every entry. Entries with the same program key share a program."""
    keys = ProgramKeys(spec, target)
    groups = _by_program(entries, keys)
    rows = read_rows(ProgramRow, store, groups)
    programs = [
        ProgramState(keys.of(members[0]), tuple(members), rows.get(key), keys.n_splits(members[0]) or 1)
        for key, members in groups.items()
    ]
    units = read_rows(UnitRow, store, dict.fromkeys(key for row in rows.values() for key in row.units))
    check = check_key_of(_firsts(groups), spec, target)
    state = (
        None
        if check is None
        else ModelCheckState(check, read_rows(ModelCheckRow, store, (check.hex,)).get(check.hex))
    )
    plan = Plan(target, tuple(programs), units, model_check=state)
    return plan if plan.is_complete else replace(plan, estimates=read_estimates(store, target))


def is_known_complete(entries: Iterable[Entry], spec: BuildSpec, target: Target, store: Store) -> bool:
    """Whether a plan for `entries` was complete before and all of its objects still exist.

    Answers for thousands of entries without reading a record. False proves nothing: make a plan.
    """
    groups = _by_program(entries, ProgramKeys(spec, target))
    return store.remembers(_looked_up(groups, check_key_of(_firsts(groups), spec, target)))


def remember_complete(plan: Plan, store: Store) -> None:
    """Makes `is_known_complete` remember `plan` if it is complete and checked, and marks its objects as used."""
    if not (plan.is_complete and plan.is_checked):
        return
    keys = [state.key.hex for state in plan.programs]
    store.remember(
        _looked_up(keys, plan.model_check.key if plan.model_check else None), plan.units, plan.digests()
    )


def check_key_of(entries: Iterable[Entry], spec: BuildSpec, target: Target) -> Key | None:
    """Returns the key of the comparison with the model; None where no step of a model is built."""
    if target.backend not in CHECKED_BACKENDS:
        return None
    has_steps = any(isinstance(entry, (PromptEntry, DecodeEntry)) for entry in entries)
    return model_check_key(spec) if has_steps else None


def _looked_up(program_keys: Iterable[str], check: Key | None) -> tuple[str, ...]:
    return (*program_keys, *([] if check is None else [check.hex]))


def _firsts(groups: Mapping[str, list[Entry]]) -> Iterator[Entry]:
    return (members[0] for members in groups.values())


def _by_program(entries: Iterable[Entry], keys: ProgramKeys) -> dict[str, list[Entry]]:
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(keys.hex_of(entry), []).append(entry)
    return groups
