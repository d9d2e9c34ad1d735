"""When the KV cache is defragmented, and in what sizes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from aotgaudi.errors import SpecError
from aotgaudi.spec.base import SpecValue
from aotgaudi.spec.limits import LARGEST_LIMIT


class DefragSpec(SpecValue):
    """The defragmenter. Defaults are vllm-gaudi's (vllm_gaudi/extension/defragmentation.py).

    It acts when the highest block in use minus `threshold` exceeds the number of blocks in use. `enabled`: where a spec
    leaves it out, it follows from what can be gained (``defragments_by_default``).
    `padded_swaps`: the numbers of block exchanges that one step is padded to, ascending; more exchanges than
    the largest take several steps. `with_graphs` (VLLM_DEFRAG_WITH_GRAPHS, hpu targets only): the exchange is a
    captured graph.
    """

    enabled: bool = True
    threshold: int = Field(default=32, ge=1, le=LARGEST_LIMIT)
    with_graphs: bool = True
    padded_swaps: tuple[Annotated[int, Field(ge=1, le=LARGEST_LIMIT)], ...] = (8, 16, 32, 64, 128, 256, 512)

    @model_validator(mode="after")
    def _check_padded_swaps(self) -> DefragSpec:
        if self.enabled and not self.padded_swaps:
            raise SpecError("defrag.padded_swaps", "is empty", "at least one size, or enabled = false")
        if list(self.padded_swaps) != sorted(set(self.padded_swaps)):
            raise SpecError(
                "defrag.padded_swaps", f"is {list(self.padded_swaps)}", "ascending sizes, each one once"
            )
        return self


def defragments_by_default(engine: str, backend: str, is_contiguous: bool) -> bool:
    """Returns whether the cache is defragmented where a spec does not say so.

    Where decodes read up to the highest block in use, exchanges make them shorter. Our own engine's decodes gather their
    blocks, and read as many wherever those lie, unless `is_contiguous` (``bucketing.contiguous_pa``), which only hpu heeds.
    """
    if engine == "aotgaudi" and backend in ("cpu", "hpu"):
        return backend == "hpu" and is_contiguous
    return True
