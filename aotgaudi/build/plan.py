"""Manifest minus hits. A plan says what would be traced and compiled, why, and how long it may take.

Imports no torch: a build with nothing to do answers from the action index alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aotgaudi.backends.base import Target
from aotgaudi.build.keys import program_key
from aotgaudi.build.records import ProgramRow, UnitRow, parse_program_row, parse_unit_row
from aotgaudi.digest import Key
from aotgaudi.manifest.entries import Entry
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.store.store import Store

UNIT_SECONDS = {"layer": 7.0, "embedding": 5.0, "head": 5.0, "sampler": 6.0, "swap": 4.0, "defrag": 4.0}
"""Compile seconds of a unit never compiled before (measured: docs/benchmarks.md)."""

TRACE_SECONDS = 4.0
SMALL_TRACE_SECONDS = 0.5
UNITS_A_STEP = ("embedding", "layer", "head")


@dataclass(frozen=True)
class ProgramState:
    """One program: its key, the entries that it serves, and what the index knows of it (None: not traced)."""

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

    def estimate_seconds(self, workers: int) -> float:
        """Returns a wall-clock estimate: known units by their label, untraced programs by a guess."""
        seconds = sum(estimate_unit_seconds(label) for label in self.missing_units.values())
        for state in self.untraced:
            kinds = (
                UNITS_A_STEP if state.entries[0].kind in ("prompt", "decode") else (state.entries[0].kind,)
            )
            seconds += TRACE_SECONDS if len(kinds) > 1 else SMALL_TRACE_SECONDS
            seconds += sum(estimate_unit_seconds(kind) for kind in kinds)
        return seconds / max(1, workers)


def make_plan(entries: Iterable[Entry], spec: BuildSpec, target: Target, store: Store) -> Plan:
    """Looks every entry up. Entries with one program key share a program."""
    groups: dict[str, tuple[Key, list[Entry]]] = {}
    for entry in entries:
        key = program_key(entry, spec, target)
        groups.setdefault(key.hex, (key, []))[1].append(entry)
    programs, units = [], dict[str, UnitRow]()
    for key_hex, (key, members) in groups.items():
        row = parse_program_row(store.actions.get(key_hex), store.objects)
        programs.append(ProgramState(key, tuple(members), row))
        for unit_key in row.units if row else ():
            if unit_key not in units and (
                found := parse_unit_row(store.actions.get(unit_key), store.objects)
            ):
                units[unit_key] = found
    return Plan(target, tuple(programs), units)


def estimate_unit_seconds(label: str) -> float:
    """Returns the expected compile seconds of a unit with this label, on one worker."""
    return UNIT_SECONDS.get(label.split(" ", 1)[0], 6.0)
