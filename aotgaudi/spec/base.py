"""The base of every value of a spec."""

from __future__ import annotations

from aotgaudi.document import SparseValue


class SpecValue(SparseValue):
    """A value that the user writes. A new field belongs into `ABSENT_BY_DEFAULT`."""
