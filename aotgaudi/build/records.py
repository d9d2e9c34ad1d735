"""What the store's records say. JSON values; a row is only ever a claim, checked against the objects.

* program key -> `ProgramRow`: the program's digest and its units.
* unit key -> `UnitRow`: the artifact's files, and what compiling cost and its check found.

A row whose objects are gone is no hit. A failure is never a row.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from pydantic import Field

from aotgaudi.bundle.receipt import UnitRecord
from aotgaudi.digest import Digest
from aotgaudi.document import Value
from aotgaudi.store.cas import ObjectStore
from aotgaudi.store.store import Store

_LOG = logging.getLogger(__name__)


class UnitSource(Value):
    """A unit of a program: the digest of its canonical text, and a label for people."""

    text: str
    label: str


class ProgramRow(Value):
    """`program` is the digest of the program's JSON; `units` maps unit keys to sources; `constants` a digest."""

    program: str
    units: dict[str, UnitSource]
    constants: str | None = None
    components: dict[str, str] = Field(default_factory=dict)

    def digests(self) -> Iterator[Digest]:
        """Yields everything that the row names. Raises ValueError."""
        yield Digest.parse(self.program)
        yield from (Digest.parse(unit.text) for unit in self.units.values())
        if self.constants:
            yield Digest.parse(self.constants)

    def is_intact(self, objects: ObjectStore) -> bool:
        """True when everything the row names is in the store."""
        return all(map(objects.has, self.digests()))


class UnitRow(UnitRecord):
    """What is recorded of a compiled unit; `cpu_seconds` includes the compiler's own processes."""

    cpu_seconds: float
    components: dict[str, str] = Field(default_factory=dict)

    def digests(self) -> Iterator[Digest]:
        """Yields the files of the artifact."""
        yield from self.artifact.values()

    def is_intact(self, objects: ObjectStore) -> bool:
        """True when every file of the artifact is in the store."""
        return all(map(objects.has, self.digests()))


def parse_program_row(value: dict[str, object] | None, objects: ObjectStore) -> ProgramRow | None:
    """Returns the row if it is well-formed and intact, else None (a miss)."""
    try:
        row = ProgramRow.model_validate(value) if value else None
        return row if row and row.is_intact(objects) else None
    except ValueError:  # Another shape, or a digest that is none.
        return None


def parse_unit_row(value: dict[str, object] | None, objects: ObjectStore) -> UnitRow | None:
    """Returns the row if it is well-formed and intact, else None (a miss)."""
    try:
        row = UnitRow.model_validate(value) if value else None
        return row if row and row.is_intact(objects) else None
    except ValueError:  # Another shape, or a digest that is none.
        return None


def record(store: Store, key: str, row: ProgramRow | UnitRow) -> None:
    """Records what a job gave. Of two results the first stays, as long as all that it names is there.

    Raises StoreError when it cannot be written.
    """
    parse = parse_program_row if isinstance(row, ProgramRow) else parse_unit_row
    recorded = store.actions.put(
        key, row.model_dump(mode="json"), lambda value: parse(value, store.objects) is not None
    )
    first = parse(recorded, store.objects)
    if first is not None and set(first.digests()) != set(row.digests()):
        _LOG.warning("%s: built twice, with different results; the first stays", key)


def read_programs(store: Store, keys: Iterable[str]) -> dict[str, ProgramRow]:
    """Returns the intact rows of those program `keys` that have one, in the order of `keys`."""
    rows = {
        key: parse_program_row(value, store.objects) for key, value in store.actions.get_many(keys).items()
    }
    return {key: row for key, row in rows.items() if row is not None}


def read_units(store: Store, keys: Iterable[str]) -> dict[str, UnitRow]:
    """Returns the intact rows of those unit `keys` that have one, in the order of `keys`."""
    rows = {key: parse_unit_row(value, store.objects) for key, value in store.actions.get_many(keys).items()}
    return {key: row for key, row in rows.items() if row is not None}
