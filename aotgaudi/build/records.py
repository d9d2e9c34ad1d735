"""What the action index remembers. JSON values; a row is only ever a claim, checked against the objects.

* program key -> `ProgramRow`: the program's digest and its units.
* unit key -> `UnitRow`: the artifact's files, and what compiling cost and its check found.

A row whose objects are gone is no hit. A failure is never a row.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from aotgaudi.bundle.receipt import UnitRecord
from aotgaudi.digest import Digest
from aotgaudi.store.cas import ObjectStore


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class UnitSource(_Row):
    """A unit of a program: the digest of its canonical text, and a label for people."""

    text: str
    label: str


class ProgramRow(_Row):
    """`program` is the digest of the program's JSON; `units` maps unit keys to sources; `constants` a digest."""

    program: str
    units: dict[str, UnitSource]
    constants: str | None = None
    components: dict[str, str] = Field(default_factory=dict)

    def is_intact(self, objects: ObjectStore) -> bool:
        """True when everything the row names is in the store."""
        digests = [
            self.program,
            *(u.text for u in self.units.values()),
            *([self.constants] if self.constants else []),
        ]
        return all(objects.has(Digest.parse(digest)) for digest in digests)


class UnitRow(UnitRecord):
    """What is recorded of a compiled unit; `cpu_seconds` includes the compiler's own processes."""

    cpu_seconds: float
    components: dict[str, str] = Field(default_factory=dict)

    def is_intact(self, objects: ObjectStore) -> bool:
        """True when every file of the artifact is in the store."""
        return all(objects.has(Digest.parse(digest)) for digest in self.artifact.values())


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
