"""What to compile for, as far as a person decides it; the rest of a target is probed."""

from __future__ import annotations

from typing import Literal

from aotgaudi.spec.base import SpecValue


class TargetSpec(SpecValue):
    """`isa` ``native``: whatever the building machine has; else a named x86-64 level, for a mixed fleet."""

    backend: Literal["cpu", "cuda", "hpu", "fake"] = "cpu"
    isa: Literal["native", "avx2", "avx512"] = "native"
