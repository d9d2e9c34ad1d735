"""How long units may take, and how long a run will: estimates, which a run corrects by what its own jobs take.

The estimate of a unit is what the most similar one took, where the store knows one, else the table's. Similar means:
the same piece of a step (`layer`, `head`, ...) for the same kind of entry, and sizes that are near in proportion. An
estimate decides which unit comes first and what a person is told, and nothing else.

A manifest minus its hits: a plan says what would be traced and compiled, and how long that may take.

Imports no torch: a build with nothing to do answers from the store's records alone."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType

from aotgaudi.backends.base import Target
from aotgaudi.compile.keys import ProgramKeys, ProgramRow, UnitRow, read_programs, read_units
from aotgaudi.digest import Digest, Key
from aotgaudi.entries import Entry
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
        "hc_post": 4.5,
        "mhc": 12.5,
    }
)
"""Compile seconds of a unit when nothing like it was compiled before (measured: docs/benchmarks.md)."""

OTHER_SECONDS = 6.0
TRACE_SECONDS = 4.0
SMALL_TRACE_SECONDS = 0.5
_UNITS_A_STEP = ("embedding", "layer", "head")

_MOST_RECORDS = 1000
"""How many earlier records are read: a hundredth of a second for 300."""

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a job's work: what kind it is of (``trace``, ``layer``, ...), and its estimate in seconds."""

    kind: str
    seconds: float


Work = tuple[Part, ...]
"""Of a job: its own part, then those that it is expected to lead to (a trace leads to units)."""

Shape = tuple[str, tuple[int, ...]]
"""A label less its numbers, and the numbers: ``("layer (decode, #, #)", (4, 128))``."""


@dataclass(frozen=True)
class Estimates:
    """Compile seconds on one worker, from `seen`: label less numbers -> (numbers, seconds) of units compiled before."""

    seen: Mapping[str, tuple[tuple[tuple[int, ...], float], ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[tuple[str, float]]) -> Estimates:
        """Makes them of the labels and seconds of earlier compiles."""
        seen: dict[str, list[tuple[tuple[int, ...], float]]] = defaultdict(list)
        for label, seconds in rows:
            text, numbers = _shape(label)
            seen[text].append((numbers, seconds))
        return cls({text: tuple(samples) for text, samples in seen.items()})

    def unit_seconds(self, label: str) -> float:
        """Returns the expected seconds of a unit with this label, a number not below 0."""
        text, numbers = _shape(label)
        samples = self.seen.get(text)
        if samples:
            return min(samples, key=lambda sample: (_distance(sample[0], numbers), sample))[1]
        return UNIT_SECONDS.get(_kind(label), OTHER_SECONDS)

    def of_unit(self, label: str) -> Work:
        """Returns what compiling this unit takes."""
        return (Part(_kind(label), self.unit_seconds(label)),)

    def of_entry(self, entry: Entry) -> Work:
        """Returns what an untraced entry takes: the trace, and the units that it may find."""
        is_step = entry.kind in ("prompt", "decode")
        kinds = _UNITS_A_STEP if is_step else (entry.kind,)
        trace = Part("trace", TRACE_SECONDS if is_step else SMALL_TRACE_SECONDS)
        return (trace, *(Part(kind, self.unit_seconds(f"{kind} {entry}")) for kind in kinds))


def read_estimates(store: Store, target: Target) -> Estimates:
    """Returns estimates from the store's records of `target`'s backend and machine, a sample of at most `_MOST_RECORDS`."""
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
"""What must be equal for one compile to say something about another. A new torch changes little."""


class TimeLeft:
    """How long a run will still take. Learns how this run's jobs compare with their estimates, by kind.

    Between events (a job ends, or another is found) what it says falls as time passes, however late a job is. At an
    event it follows what was learnt: down at once, up by a quarter or by 10 seconds at most, and by more at the next.
    """

    def __init__(self) -> None:
        self._measured: dict[str, float] = defaultdict(float)
        self._estimated: dict[str, float] = defaultdict(float)
        self._event: object = None
        self._work = self._shown = math.inf

    def learn(self, part: Part, seconds: float) -> None:
        """Takes note of what a job of this run took, in wall-clock seconds."""
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
        """Returns the seconds that are left, 0 or more, and 0 only if nothing is.

        Args:
            waiting: Jobs that have not begun.
            running: Jobs under way, each with the seconds since it began.
            num_workers: How many jobs may be under way at a time.
            event: Another value than before where something happened, e.g. the number of jobs that are done.
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
        """The estimate, multiplied by how much longer jobs of its kind took than estimated; few jobs weigh little."""
        overall = _ratio(self._measured[_ALL], self._estimated[_ALL], 1.0)
        return part.seconds * _ratio(self._measured[part.kind], self._estimated[part.kind], overall)


_ALL = "all kinds"
_RISE, _RISE_SECONDS = 1.25, 10.0
_PRIOR_SECONDS = 5.0


def _ratio(measured: float, estimated: float, prior: float) -> float:
    return (measured + _PRIOR_SECONDS * prior) / (estimated + _PRIOR_SECONDS)


def _rest(seconds: float, elapsed: float) -> float:
    """The seconds left of a job that was expected to take `seconds`: always more than 0, and falling."""
    return seconds * math.exp(-elapsed / seconds) if seconds > 0 else 0.0


def _kind(label: str) -> str:
    return label.split(" ", 1)[0]


def _shape(label: str) -> Shape:
    return _NUMBER.sub("#", label), tuple(map(int, _NUMBER.findall(label)))


def _distance(left: tuple[int, ...], right: tuple[int, ...]) -> float:
    """How far sizes are apart, in doublings."""
    return sum(abs(math.log2((a + 1) / (b + 1))) for a, b in zip(left, right, strict=True))


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
