"""Predicts what an upgrade would invalidate, by changing components of a plan's keys.

A program's key has every component, so a change of any component traces the program again. A unit's key has the target and
the text of its graph. Another torch, compiler or instruction set changes the target, so the unit is compiled again. Another
transformers, or a change of our graph code, does not: the unit is compiled again only if its text changes, which only
tracing can tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from aotgaudi.backends.base import Target
from aotgaudi.backends.offline import with_isa
from aotgaudi.compile.keys import ProgramKeys, ProgramRow, read_programs
from aotgaudi.compile.plan import Plan, ProgramState
from aotgaudi.compile.why import BuiltUnit, Change, Cost
from aotgaudi.errors import SpecError
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.store.store import Store

SHORT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "graphs": "toolchain.graphs",
        "transformers": "toolchain.transformers",
    }
)
"""Short names of components. Those of the target's toolchain (torch, compiler, ...) need no row."""

_ISA = "isa"
_WHERE = "--what-if"


@dataclass(frozen=True)
class WhatIf:
    """The effect of `changes` on what is built now.

    `num_programs` programs of `num_entries` entries are traced again. `already` programs were built under the new values
    before. `units` is the cost of what was compiled for the invalidated programs. `is_certain`: all of these units are
    compiled again; otherwise only those whose text changes. `num_cold` programs are not built now either.
    """

    changes: tuple[Change, ...]
    num_entries: int
    num_programs: int
    already: int
    num_cold: int
    units: Cost
    is_certain: bool


def parse_changes(settings: Iterable[str], keys: ProgramKeys, target: Target) -> tuple[Change, ...]:
    """Returns the changes that ``NAME=VALUE`` settings make in the keys of all entries. A current value changes nothing.

    Raises SpecError for an unknown name, and lists the known ones.
    """
    now = dict(keys.common)
    wanted: dict[str, str] = {}
    for setting in settings:
        name, is_given, value = setting.partition("=")
        if not is_given or not value:
            raise SpecError(_WHERE, f"is {setting!r}", "NAME=VALUE, e.g. torch=2.14")
        for full, text in _components(name.strip(), value.strip(), now, target).items():
            if wanted.get(full, text) != text:
                raise SpecError(
                    _WHERE, f"gives {full} twice: {wanted[full]!r} and {text!r}", "each name once"
                )
            wanted[full] = text
    return tuple(Change(name, now[name], value) for name, value in wanted.items() if now[name] != value)


def what_if(changes: tuple[Change, ...], plan: Plan, spec: BuildSpec, store: Store) -> WhatIf:
    """Returns what `changes` would invalidate of what is built now in `plan`. Raises StoreError."""
    warm = [state for state in plan.programs if _is_whole(state.row, plan)]
    after = _rows_after(changes, warm, ProgramKeys(spec, plan.target), store)
    gone = [state for state, row in zip(warm, after, strict=True) if row is None]
    kept = {key for row in after if row is not None for key in row.units}
    keys = {key for state in gone if state.row for key in state.row.units} - kept
    units = {key: BuiltUnit(key, {}, row.label, row.compile_seconds) for key, row in plan.units.items()}
    return WhatIf(
        changes=changes,
        num_entries=sum(len(state.entries) for state in gone),
        num_programs=len(gone),
        already=len(warm) - len(gone),
        num_cold=len(plan.programs) - len(warm),
        units=Cost.of(keys, units),
        is_certain=any(change.name.startswith("target.") for change in changes),
    )


def _rows_after(
    changes: tuple[Change, ...], states: list[ProgramState], keys: ProgramKeys, store: Store
) -> list[ProgramRow | None]:
    """Returns the store's records of the same entries under the new keys."""
    new = keys.replacing({change.name: change.new or "" for change in changes})
    names = [new.hex_of(state.entries[0]) for state in states]
    rows = read_programs(store, names)
    return [rows.get(name) for name in names]


def _is_whole(row: ProgramRow | None, plan: Plan) -> bool:
    return row is not None and all(key in plan.units for key in row.units)


def _components(name: str, value: str, now: Mapping[str, str], target: Target) -> dict[str, str]:
    """Returns the full names that a short name stands for, with their new values."""
    if name == _ISA:
        return {n: text for n, text in _isa_components(target, value) if now.get(n) not in (None, text)}
    for full in (name, SHORT_NAMES.get(name, ""), f"target.toolchain.{name}"):
        if full in now:
            return {full: value}
    if name == "schema" or name.startswith("entry."):
        raise SpecError(_WHERE, f"cannot change {name!r}", "what is in the keys of all entries")
    toolchain = [f for f in now if f.startswith("target.toolchain.")]
    short = [_ISA, *(full.removeprefix("target.toolchain.") for full in toolchain), *SHORT_NAMES]
    known = ", ".join([*sorted(short), *sorted(now)])
    raise SpecError(_WHERE, f"{name!r} is in no key", f"known: {known}")


def _isa_components(target: Target, isa: str) -> tuple[tuple[str, str], ...]:
    try:
        return with_isa(target, isa).components()
    except SpecError as error:
        raise SpecError(_WHERE, f"isa {error.problem}", error.remedy) from error
