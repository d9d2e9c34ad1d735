"""Says why programs and units are not warm: which component of which key differs from what was built before.

Whether something is warm is decided by a plan or a receipt. This module says why not, and what it will cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from aotgaudi.compile.compare import ENTRY, Change, NearestProgram, NearestUnit, changes
from aotgaudi.compile.history import BuiltProgram, BuiltUnit, Cost, History
from aotgaudi.compile.keys import ProgramKeys, unit_key_of_graph
from aotgaudi.compile.plan import Plan, ProgramState
from aotgaudi.digest import Digest, Key
from aotgaudi.entries import Entry
from aotgaudi.errors import CorruptError, StoreError
from aotgaudi.store.store import Store

State = Literal["warm", "changed", "new", "lost", "never built"]
"""`changed`: built before, under another key. `new`: only others like it were built. `lost`: built, but objects are gone."""

_TARGET = "target."
_GRAPH = "graph"


@dataclass(frozen=True)
class Finding:
    """The state of one program (which runs `entries`) or one unit (which has no entries), and the reason for it.

    `label` is the first entry, or the unit's label. `nearest` is the nearest thing that was built, and `changes` are the
    components that differ from it. `lines` is the first line in which the unit's text differs, old and new, if the store
    has both texts.
    """

    key: Key
    label: str
    state: State
    entries: tuple[Entry, ...] = ()
    nearest: BuiltProgram | BuiltUnit | None = None
    changes: tuple[Change, ...] = ()
    lines: tuple[str, str] | None = None

    @property
    def is_program(self) -> bool:
        """Whether this is about a program."""
        return bool(self.entries)

    @property
    def unit_keys(self) -> tuple[str, ...]:
        """The units that are likely to cost as much as this one will."""
        if isinstance(self.nearest, BuiltProgram):
            return self.nearest.units
        return (self.nearest.key,) if self.nearest else ()


@dataclass(frozen=True)
class Reason:
    """Programs or units that are not warm for the same reason. `findings`: at least one, in the manifest's order."""

    findings: tuple[Finding, ...]

    @property
    def state(self) -> State:
        """The state that they all share."""
        return self.findings[0].state

    @property
    def num_entries(self) -> int:
        """How many entries wait for these programs; 0 for units."""
        return sum(len(finding.entries) for finding in self.findings)

    @property
    def is_certain(self) -> bool:
        """Whether units are compiled again whatever tracing gives: every unit's key holds the target's components."""
        return any(change.name.startswith(_TARGET) for change in self.findings[0].changes)

    def cost(self, history: History) -> Cost:
        """Returns what the units of the nearest programs (or the nearest units) took when they were compiled.

        Each new program is taken to cost as much as the program nearest to it.
        """
        if self.state != "new":
            return Cost.of((key for finding in self.findings for key in finding.unit_keys), history.units)
        costs = [Cost.of(finding.unit_keys, history.units) for finding in self.findings]
        return Cost(
            sum(cost.num_units for cost in costs),
            sum(cost.seconds for cost in costs),
            sum(cost.num_untimed for cost in costs),
        )


def reasons(findings: Iterable[Finding]) -> tuple[Reason, ...]:
    """Groups the findings that are not warm by reason, in order of appearance.

    Being new is one reason, whichever entry or graph is the nearest.
    """
    groups: dict[object, list[Finding]] = defaultdict(list)
    for finding in findings:
        if finding.state != "warm":
            groups[_reason(finding)].append(finding)
    return tuple(Reason(tuple(group)) for group in groups.values())


def explain_plan(plan: Plan, store: Store, history: History) -> tuple[Finding, ...]:
    """Returns a finding for every program of `plan`, then for every unit that has no artifact."""
    programs, units = NearestProgram(history.programs.values()), NearestUnit(history.units.values())
    found = [_of_program(state, programs, history) for state in plan.programs]
    return (*found, *_of_units(plan, units, store, history))


def explain_against(
    entries: Iterable[Entry], keys: ProgramKeys, built: Iterable[BuiltProgram]
) -> tuple[Finding, ...]:
    """Returns a finding for the program of every entry, taking `built` for all that was ever built."""
    programs = {program.key: program for program in built}
    nearest = NearestProgram(programs.values())
    groups: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[keys.hex_of(entry)].append(entry)
    return tuple(
        _warm(keys.of(group[0]), tuple(group), programs[key])
        if key in programs
        else _missing(keys.of(group[0]), tuple(group), nearest)
        for key, group in groups.items()
    )


def _of_program(state: ProgramState, nearest: NearestProgram, history: History) -> Finding:
    built = history.programs.get(state.key.hex)
    if state.row is not None:
        return _warm(state.key, state.entries, built)
    if built is not None:
        return Finding(state.key, str(state.entries[0]), "lost", state.entries, built)
    return _missing(state.key, state.entries, nearest)


def _warm(key: Key, entries: tuple[Entry, ...], built: BuiltProgram | None) -> Finding:
    return Finding(key, str(entries[0]), "warm", entries, built)


def _missing(key: Key, entries: tuple[Entry, ...], nearest: NearestProgram) -> Finding:
    components = dict(key.components)
    built = nearest.find(components)
    if built is None:
        return Finding(key, str(entries[0]), "never built", entries)
    found = changes(built.components, components)
    state: State = "new" if any(change.name.startswith(ENTRY) for change in found) else "changed"
    return Finding(key, str(entries[0]), state, entries, built, found)


def _of_units(plan: Plan, nearest: NearestUnit, store: Store, history: History) -> Iterator[Finding]:
    texts = {key: unit.text for state in plan.programs if state.row for key, unit in state.row.units.items()}
    for hexdigits, label in plan.missing_units.items():
        digest = Digest.parse(texts[hexdigits])
        key = unit_key_of_graph(digest.sha256, plan.target)
        if hexdigits in history.units:
            yield Finding(key, label, "lost", nearest=history.units[hexdigits])
            continue
        built = nearest.find(dict(key.components), label)
        if built is None:
            yield Finding(key, label, "never built")
            continue
        found = changes(built.components, dict(key.components))
        lines = _differing_lines(store, history.texts.get(built.components.get(_GRAPH, "")), str(digest))
        yield Finding(key, label, "changed", nearest=built, changes=found, lines=lines)


def _differing_lines(store: Store, old: str | None, new: str) -> tuple[str, str] | None:
    """Returns the first line that differs, of each text ("" past its end), or None if there is nothing to show."""
    if old is None or old == new:
        return None
    try:
        texts = [store.objects.read(Digest.parse(text)).decode().splitlines() for text in (old, new)]
    except (StoreError, CorruptError, ValueError):
        return None
    before, after = texts
    length = max(len(before), len(after))
    pairs = zip(*(lines + [""] * (length - len(lines)) for lines in (before, after)), strict=True)
    return next(((one, other) for one, other in pairs if one != other), None)


def _reason(finding: Finding) -> object:
    shared = tuple(c for c in finding.changes if not c.name.startswith(ENTRY) and c.name != _GRAPH)
    return finding.is_program, finding.state, shared
