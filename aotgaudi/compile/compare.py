"""Finds what was built that is nearest to what is wanted, by comparing lists of key components by name.

Programs: the same entry of the same model comes first, whatever else differs; then what has the fewest differing
components, the same entry before others. Units: the same graph first, then the same label. Ties go to the smaller
key, so that the answer is the same each time.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar, Union

from aotgaudi.compile.history import BuiltProgram, BuiltUnit

Components = Mapping[str, str]
Rows = tuple[tuple[str, str], ...]
Built = TypeVar("Built", bound=Union[BuiltProgram, BuiltUnit])

ENTRY = "entry."
_KIND = "entry.kind"
_MODEL = ("model.", "limits.")


@dataclass(frozen=True, slots=True)
class Change:
    """One key component that differs. None: that side does not have the component."""

    name: str
    old: str | None
    new: str | None


def changes(old: Components, new: Components) -> tuple[Change, ...]:
    """Returns the components that differ, in the order of `new`; those that only `old` has come last."""
    names = dict.fromkeys([*new, *sorted(old)])
    return tuple([Change(n, old.get(n), new.get(n)) for n in names if old.get(n) != new.get(n)])


class NearestProgram:
    """Finds the nearest of the programs in `built`. Fast for many keys that differ only in their entries."""

    def __init__(self, built: Iterable[BuiltProgram]) -> None:
        self._of_entry: dict[Rows, list[BuiltProgram]] = defaultdict(list)
        self._of_rest: dict[Rows, dict[Rows, BuiltProgram]] = defaultdict(dict)
        for program in sorted(built, key=lambda program: program.key):
            own, rest = _parts(program.components)
            self._of_entry[own].append(program)
            for part in _shared_parts(own):
                self._of_rest[rest].setdefault(part, program)
        self._ranks: dict[Rows, list[tuple[int, Rows]]] = {}

    def find(self, components: Components) -> BuiltProgram | None:
        """Returns the nearest program of an entry of the same kind, or None if there is none."""
        own, rest = _parts(components)
        same = self._of_entry.get(own, [])
        of_model = [program for program in same if _model(program.components) == _model(components)]
        if of_model:
            return _least(of_model, components)
        return self._fewest(_least(same, components), components, own, rest)

    def _fewest(
        self, best: BuiltProgram | None, components: Components, own: Rows, rest: Rows
    ) -> BuiltProgram | None:
        """Returns `best`, or a program of another entry that differs in fewer components."""
        fewest = math.inf if best is None else _distance(best, components)
        for distance, other in self._ranked(rest):
            if distance + 1 >= fewest:
                break  # Another entry differs in one component more, at least.
            programs = self._of_rest[other]
            found = next((programs[part] for part in _shared_parts(own) if part in programs), None)
            if found is not None and _distance(found, components) < fewest:
                best, fewest = found, _distance(found, components)
        return best

    def _ranked(self, rest: Rows) -> list[tuple[int, Rows]]:
        """The parts of recorded keys that do not concern entries, with how many components differ, the fewest first."""
        if rest not in self._ranks:
            wanted = dict(rest)
            self._ranks[rest] = sorted((len(changes(dict(other), wanted)), other) for other in self._of_rest)
        return self._ranks[rest]


class NearestUnit:
    """Finds the nearest of the units in `built`."""

    def __init__(self, built: Iterable[BuiltUnit]) -> None:
        units = sorted(built, key=lambda unit: unit.key)
        self._of_graph = _grouped(units, lambda unit: unit.components.get("graph", ""))
        self._of_label = _grouped(units, lambda unit: unit.label)

    def find(self, components: Components, label: str) -> BuiltUnit | None:
        """Returns the nearest unit of the same graph, else of the same label, or None if there is neither."""
        same = self._of_graph.get(components["graph"]) or self._of_label.get(label, [])
        return _least(same, components)


def _least(built: Iterable[Built], components: Components) -> Built | None:
    return min(built, key=lambda one: _distance(one, components), default=None)


def _distance(one: BuiltProgram | BuiltUnit, components: Components) -> int:
    return len(changes(one.components, components))


def _parts(components: Components) -> tuple[Rows, Rows]:
    own = tuple(sorted(row for row in components.items() if row[0].startswith(ENTRY)))
    return own, tuple(sorted(row for row in components.items() if not row[0].startswith(ENTRY)))


def _shared_parts(own: Rows) -> Iterator[Rows]:
    """Yields what two entries of one kind may have in common, the longest first. Entries have at most four fields."""
    kind = tuple(row for row in own if row[0] == _KIND)
    fields = [row for row in own if row[0] != _KIND]
    for size in range(len(fields), -1, -1):
        yield from ((*kind, *part) for part in itertools.combinations(fields, size))


def _model(components: Components) -> dict[str, str]:
    return {name: value for name, value in components.items() if name.startswith(_MODEL)}


def _grouped(units: Iterable[BuiltUnit], name: Callable[[BuiltUnit], str]) -> dict[str, list[BuiltUnit]]:
    groups: dict[str, list[BuiltUnit]] = defaultdict(list)
    for unit in units:
        groups[name(unit)].append(unit)
    return groups
