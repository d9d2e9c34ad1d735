"""Finds what is built, and how long it took, in a bundle or a store.

A bundle holds no times (docs/adr/0010-bundle-and-trust.md). They are in the records of the store that built it, and are
looked up if that store is available. A bundle's programs are verified as they are read. Its units are not read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from aotgaudi.bundle.bundle import Bundle
from aotgaudi.bundle.receipt import SealedUnit
from aotgaudi.compile.keys import UnitRow, read_rows
from aotgaudi.compile.plan import Plan
from aotgaudi.entries import Entry
from aotgaudi.errors import CorruptError, ManifestError, NotWarmError
from aotgaudi.store.store import Store


@dataclass(frozen=True, slots=True)
class Inventory:
    """Everything that is built.

    `programs`: the entries of each program that can run, and the keys of its units. `records`: the store's records of units.
    `lost`: the programs that cannot be read, in words.
    """

    source: Literal["bundle", "store"]
    programs: tuple[tuple[tuple[Entry, ...], tuple[str, ...]], ...]
    units: Mapping[str, SealedUnit]
    records: Mapping[str, UnitRow]
    lost: tuple[str, ...] = ()

    @property
    def entries(self) -> frozenset[Entry]:
        """The entries with a program that can run."""
        return frozenset(entry for entries, _ in self.programs for entry in entries)


def inventory_of_bundle(bundle: Bundle, store: Store | None) -> Inventory:
    """Returns what a bundle of programs holds. Raises as `Bundle.manifest` does, and SpecError for a capture."""
    receipt = bundle.require_programs()
    groups: dict[str, list[Entry]] = defaultdict(list)
    for entry in bundle.manifest.entries:
        if entry.id in receipt.programs:
            groups[str(receipt.programs[entry.id])].append(entry)
    programs, lost = [], []
    for entries in groups.values():
        try:
            programs.append((tuple(entries), bundle.program(entries[0].id).unit_keys()))
        except (NotWarmError, CorruptError, ManifestError) as error:
            lost.append(str(error))
    records = {} if store is None else read_rows(UnitRow, store, receipt.units)
    return Inventory("bundle", tuple(programs), receipt.units, records, tuple(lost))


def inventory_of_plan(plan: Plan) -> Inventory:
    """Returns the part of a plan that the store has already."""
    programs = tuple((state.entries, tuple(row.units)) for state, row in plan.complete)
    return Inventory("store", programs, plan.units, plan.units)


def inventory_document(found: Inventory) -> dict[str, Any]:
    """Returns units with sizes, reuse and times as a JSON value, the largest first. Seconds are None without a record."""
    programs: Counter[str] = Counter()
    entries: Counter[str] = Counter()
    first: dict[str, Entry] = {}
    for served, keys in found.programs:
        for key in keys:
            programs[key] += 1
            entries[key] += len(served)
            first.setdefault(key, served[0])
    units: list[dict[str, Any]] = []
    for key, unit in found.units.items():
        record = found.records.get(key)
        units.append(
            {
                "key": key,
                "label": record.label if record else str(first.get(key, "of no entry")),
                "size_bytes": sum(digest.size_bytes for digest in unit.artifact.values()),
                "num_programs": programs[key],
                "num_entries": entries[key],
                "compile_seconds": record.compile_seconds if record else None,
            }
        )
    units.sort(key=lambda unit: (-unit["size_bytes"], unit["label"], unit["key"]))
    timed = [unit["compile_seconds"] for unit in units if unit["compile_seconds"] is not None]
    return {
        "source": found.source,
        "num_programs": len(found.programs),
        "num_units": len(units),
        "size_bytes": sum(unit["size_bytes"] for unit in units),
        "num_timed": len(timed),
        "compile_seconds": round(sum(timed), 3),
        "units": units,
    }
