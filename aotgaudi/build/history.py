"""What was built before: the programs and units that a store's records, or a bundle's receipt, speak of.

History is for comparing with, never for building from: a record whose objects are gone still says what was built,
and how long it took.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from pydantic import ValidationError

from aotgaudi.build.records import ProgramRow, UnitRow
from aotgaudi.store.records import RecordStore
from aotgaudi.store.store import Store


@dataclass(frozen=True)
class BuiltProgram:
    """A program that was traced: the components of its key, the keys of its units, and the digest of its JSON."""

    key: str
    components: Mapping[str, str]
    units: tuple[str, ...] = ()
    digest: str = ""


@dataclass(frozen=True)
class BuiltUnit:
    """A unit that was compiled. `seconds` is what compiling took; `label` is for people."""

    key: str
    components: Mapping[str, str]
    label: str
    seconds: float


@dataclass(frozen=True)
class History:
    """Programs and units by key. `texts`: sha256 of a unit's canonical text -> the object that holds it."""

    programs: Mapping[str, BuiltProgram] = field(default_factory=dict)
    units: Mapping[str, BuiltUnit] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_store(cls, store: Store) -> History:
        """Reads every record of `store` and of the layers below it. Raises StoreError.

        What is no record of a program or a unit is passed over, as a look-up would.
        """
        programs: dict[str, BuiltProgram] = {}
        units: dict[str, BuiltUnit] = {}
        texts: dict[str, str] = {}
        for key, row in _rows(store):
            if isinstance(row, ProgramRow):
                programs.setdefault(key, BuiltProgram(key, row.components, tuple(row.units), row.program))
                texts.update((_sha256_of(unit.text), unit.text) for unit in row.units.values())
            else:
                units.setdefault(key, BuiltUnit(key, row.components, row.label, row.compile_seconds))
        return cls(programs, units, texts)


@dataclass(frozen=True)
class Cost:
    """What compiling some units took when it was last done.

    `seconds` is the sum of those that are on record; `num_untimed` units are not. One worker, each unit once.
    """

    num_units: int
    seconds: float
    num_untimed: int

    @classmethod
    def of(cls, unit_keys: Iterable[str], units: Mapping[str, BuiltUnit]) -> Cost:
        """Returns the cost of the distinct `unit_keys`, by the records in `units`."""
        keys = sorted(set(unit_keys))
        timed = [units[key].seconds for key in keys if key in units]
        return cls(len(keys), sum(timed), len(keys) - len(timed))


def _rows(store: Store) -> Iterator[tuple[str, ProgramRow | UnitRow]]:
    for records in (store.actions.records, *map(RecordStore, store.lower)):
        for key in sorted(records.keys()):
            value = records.get(key)
            row = None if value is None else _row_of(value)
            if row is not None:
                yield key, row


def _row_of(value: dict[str, object]) -> ProgramRow | UnitRow | None:
    try:
        return ProgramRow.model_validate(value) if "program" in value else UnitRow.model_validate(value)
    except ValidationError:
        return None


def _sha256_of(digest: str) -> str:
    return digest.removeprefix("sha256:").partition(":")[0]
