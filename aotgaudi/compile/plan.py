"""A plan: which programs and units of a manifest the store lacks, and how long building them may take.

Imports no torch: if a build has nothing to do, the store's records alone answer.

The estimate for a unit is the time of the most similar unit on record, or else a value from a table. Similar units are the
same piece of a step (`layer`, `head`, ...) for the same kind of entry, with sizes close in proportion. A run corrects the
estimates by the times of its jobs. Estimates only decide the order of units and the displayed time.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType

from aotgaudi.backends.base import Target
from aotgaudi.compile.keys import (
    CHECKED_BACKENDS,
    ModelCheckRow,
    ProgramKeys,
    ProgramRow,
    UnitRow,
    model_check_key,
    read_model_check,
    read_programs,
    read_units,
)
from aotgaudi.digest import Digest, Key
from aotgaudi.entries import DecodeEntry, Entry, PromptEntry
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.store.roots import Root
from aotgaudi.store.store import Store

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
"""Compile seconds of a unit if no similar unit is on record (measured: docs/benchmarks.md)."""

OTHER_SECONDS = 6.0
TRACE_SECONDS = 4.0
MODEL_CHECK_SECONDS = 5.0
SMALL_TRACE_SECONDS = 0.5
_UNITS_A_STEP = ("embedding", "layer", "head")

_MOST_RECORDS = 1000
"""The most records that estimates are read from; 300 take a hundredth of a second."""

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a job's work: its kind (``trace``, ``layer``, ...) and its estimate in seconds."""

    kind: str
    seconds: float


Work = tuple[Part, ...]
"""A job's part, then the parts that should follow from it (a trace leads to units)."""

Shape = tuple[str, tuple[int, ...]]
"""A label without its numbers, and the numbers: ``("layer (decode, #, #)", (4, 128))``."""


@dataclass(frozen=True)
class Estimates:
    """Compile seconds on one worker. `seen` maps a label without numbers to (numbers, seconds) of units compiled before."""

    seen: Mapping[str, tuple[tuple[tuple[int, ...], float], ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[tuple[str, float]]) -> Estimates:
        """Makes estimates from the labels and seconds of earlier compiles."""
        seen: dict[str, list[tuple[tuple[int, ...], float]]] = defaultdict(list)
        for label, seconds in rows:
            text, numbers = _shape(label)
            seen[text].append((numbers, seconds))
        return cls({text: tuple(samples) for text, samples in seen.items()})

    def unit_seconds(self, label: str) -> float:
        """Returns the expected seconds of a unit with this label, at least 0."""
        text, numbers = _shape(label)
        samples = self.seen.get(text)
        if samples:
            return min(samples, key=lambda sample: (_distance(sample[0], numbers), sample))[1]
        return UNIT_SECONDS.get(_kind(label), OTHER_SECONDS)

    def of_unit(self, label: str) -> Work:
        """Returns the expected work of compiling this unit."""
        return (Part(_kind(label), self.unit_seconds(label)),)

    def of_model_check(self) -> Work:
        """Returns the expected work of comparing graphs with the model."""
        return (Part("check", MODEL_CHECK_SECONDS),)

    def of_entry(self, entry: Entry) -> Work:
        """Returns the expected work for an untraced entry: the trace, and the units that it may produce."""
        is_step = entry.kind in ("prompt", "decode")
        kinds = _UNITS_A_STEP if is_step else (entry.kind,)
        trace = Part("trace", TRACE_SECONDS if is_step else SMALL_TRACE_SECONDS)
        return (trace, *(Part(kind, self.unit_seconds(f"{kind} {entry}")) for kind in kinds))


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
    """Predicts how long the rest of a run takes. It learns how this run's jobs compare with their estimates, by kind.

    Between events (a job ends, or a new one is found) the prediction falls as time passes, even if a job is late. At an
    event it follows what was learnt: down at once, up by at most a quarter or 10 seconds, whichever is more.
    """

    def __init__(self) -> None:
        self._measured: dict[str, float] = defaultdict(float)
        self._estimated: dict[str, float] = defaultdict(float)
        self._event: object = None
        self._work = self._shown = math.inf

    def learn(self, part: Part, seconds: float) -> None:
        """Records the wall-clock seconds of a job of this run."""
        for kind in (part.kind, _ALL):
            self._measured[kind] += max(0.0, seconds)
            self._estimated[kind] += part.seconds

    def seconds(
        self,
        *,
        waiting: Sequence[Work],
        running: Sequence[tuple[Work, float]],
        num_workers: int,
        event: object,
    ) -> float:
        """Returns the seconds that are left; 0 only if no work is left.

        Args:
            waiting: Jobs that have not begun.
            running: Running jobs, each with the seconds since it began.
            num_workers: How many jobs may run at a time.
            event: A value that changes at each event, e.g. the number of finished jobs.
        """
        work = sum(self._expected(part) for parts in waiting for part in parts)
        for (own, *later), elapsed in running:
            work += _rest(self._expected(own), elapsed) + sum(map(self._expected, later))
        work /= max(1, min(num_workers, len(waiting) + len(running)))
        if event == self._event and self._work > 0:
            self._shown *= min(1.0, work / self._work)
        else:
            self._shown = min(work, max(_RISE * self._shown, self._shown + _RISE_SECONDS))
        self._event, self._work = event, work
        return self._shown

    def _expected(self, part: Part) -> float:
        """Returns the estimate times the measured-to-estimated ratio of its kind. A few jobs change the ratio little."""
        overall = _ratio(self._measured[_ALL], self._estimated[_ALL], 1.0)
        return part.seconds * _ratio(self._measured[part.kind], self._estimated[part.kind], overall)


_ALL = "all kinds"
_RISE, _RISE_SECONDS = 1.25, 10.0
_PRIOR_SECONDS = 5.0


def _ratio(measured: float, estimated: float, prior: float) -> float:
    return (measured + _PRIOR_SECONDS * prior) / (estimated + _PRIOR_SECONDS)


def _rest(seconds: float, elapsed: float) -> float:
    """Returns the remaining seconds of a job that should take `seconds`: always more than 0, and falling."""
    return seconds * math.exp(-elapsed / seconds) if seconds > 0 else 0.0


def _kind(label: str) -> str:
    return label.split(" ", 1)[0]


def _shape(label: str) -> Shape:
    return _NUMBER.sub("#", label), tuple(map(int, _NUMBER.findall(label)))


def _distance(left: tuple[int, ...], right: tuple[int, ...]) -> float:
    """Returns the distance between sizes, in doublings."""
    return sum(abs(math.log2((a + 1) / (b + 1))) for a, b in zip(left, right, strict=True))


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

    def digests(self) -> Iterator[Digest]:
        """Yields every object that was found (programs, texts, constants and artifacts), possibly more than once."""
        programs = (state.row.digests() for state in self.programs if state.row)
        yield from chain(*programs, *(row.digests() for row in self.units.values()))

    def as_root(self, name: str) -> Root:
        """Returns the root that keeps everything that was found, including texts, so that nothing is traced again.

        Raises ValueError for an invalid name.
        """
        programs = (state.key.hex for state in self.programs if state.row is not None)
        check = self.model_check
        checks = [] if check is None or check.row is None else [check.key.hex]
        keys = frozenset((*programs, *self.units, *checks))
        return Root(name=name, keys=keys, objects=frozenset(self.digests()))

    def estimate_seconds(self, workers: int) -> float:
        """Returns a wall-clock estimate. The work of an untraced program is guessed from its kind of entry."""
        known = (self.estimates.of_unit(label) for label in self.missing_units.values())
        guessed = (self.estimates.of_entry(state.entries[0]) for state in self.untraced)
        return sum(part.seconds for work in chain(known, guessed) for part in work) / max(1, workers)


def make_plan(entries: Iterable[Entry], spec: BuildSpec, target: Target, store: Store) -> Plan:
    """Looks up every entry. Entries with the same program key share a program."""
    keys = ProgramKeys(spec, target)
    groups = _by_program(entries, keys)
    rows = read_programs(store, groups)
    programs = [
        ProgramState(keys.of(members[0]), tuple(members), rows.get(key), keys.n_splits(members[0]) or 1)
        for key, members in groups.items()
    ]
    units = read_units(store, dict.fromkeys(key for row in rows.values() for key in row.units))
    check = check_key_of(_firsts(groups), spec, target)
    state = None if check is None else ModelCheckState(check, read_model_check(store, check.hex))
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
