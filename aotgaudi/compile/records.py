"""What the store's records say, as JSON values. A row is a claim, which is checked against the objects.

* program key -> `ProgramRow`: the program's digest and its units.
* unit key -> `UnitRow`: the artifact's files, and what compiling cost and its check found.

A row whose objects are gone is a miss. A failure is never recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TypeVar, Union, cast

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


class UnitRow(UnitRecord):
    """What is recorded of a compiled unit; `cpu_seconds` includes the compiler's own processes."""

    cpu_seconds: float
    components: dict[str, str] = Field(default_factory=dict)

    def digests(self) -> Iterator[Digest]:
        """Yields the files of the artifact."""
        yield from self.artifact.values()


RowT = TypeVar("RowT", bound=Union[ProgramRow, UnitRow])


def record(store: Store, key: str, row: ProgramRow | UnitRow) -> None:
    """Records the result of a job. Of two results the first one stays, as long as everything that it names is there.

    Raises StoreError when it cannot be written.
    """
    recorded = store.actions.put(
        key, row.model_dump(mode="json"), lambda value: _intact(type(row), value, store.objects) is not None
    )
    first = _intact(type(row), recorded, store.objects)
    if first is not None and set(first.digests()) != set(row.digests()):
        _LOG.warning("%s: built twice, with different results; the first stays", key)


def read_programs(store: Store, keys: Iterable[str]) -> dict[str, ProgramRow]:
    """Returns the intact rows of `keys`, program keys, in their order; a key without one is left out."""
    return _read(ProgramRow, store, keys)


def read_units(store: Store, keys: Iterable[str]) -> dict[str, UnitRow]:
    """Returns the intact rows of `keys`, unit keys, in their order; a key without one is left out."""
    return _read(UnitRow, store, keys)


def _read(kind: type[RowT], store: Store, keys: Iterable[str]) -> dict[str, RowT]:
    values = store.actions.get_many(keys).items()
    rows = ((key, _intact(kind, value, store.objects)) for key, value in values)
    return {key: row for key, row in rows if row is not None}


def _intact(kind: type[RowT], value: dict[str, object] | None, objects: ObjectStore) -> RowT | None:
    """Returns the row if it is well-formed and everything that it names is in the store, else None (a miss)."""
    try:
        row = cast("RowT", kind.model_validate(value)) if value else None
        return row if row and all(map(objects.has, row.digests())) else None
    except ValueError:  # Another shape, or a malformed digest.
        return None
