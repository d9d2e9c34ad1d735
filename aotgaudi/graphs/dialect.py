"""In which form a device's compiler takes graphs. Imports no torch.

What each form is, `forms.py` says. A dialect decides nothing about which steps there are, and a server that runs programs
need not know it: a program lists its inputs and caches, and every name means the same in all dialects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aotgaudi.spec.build_spec import BuildSpec

DialectName = Literal["aten", "hpu"]


@dataclass(frozen=True, slots=True)
class Dialect:
    """``aten``: what inductor takes. ``hpu``: what Intel's bridge compiles whole and writes in place.

    `is_contiguous`: a decode reads the cache from its first block to the highest one in use, without a gather.
    """

    name: DialectName = "aten"
    is_contiguous: bool = False

    @property
    def noise_dtype(self) -> str:
        """The dtype of a sampler's noise: a Gaudi has no float64."""
        return "float64" if self.name == "aten" else "float32"


ATEN = Dialect()


def dialect_of(spec: BuildSpec) -> Dialect:
    """Returns the dialect of a spec's graphs."""
    if spec.target.backend != "hpu":
        return ATEN
    return Dialect("hpu", spec.reads_contiguous_blocks)
