"""Which shapes are enumerated: a public strategy, at a named version of its rules."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from aotgaudi.spec.base import SpecValue
from aotgaudi.spec.limits import LARGEST_LIMIT


class BucketingSpec(SpecValue):
    """Names one strategy and version of ``aotgaudi.bucketing.versions``, and its options.

    `contiguous_pa`: decode buckets for contiguous paged attention, where a step spans all blocks up to its
    highest one. `prompt_query_min_one`: query lengths start at 1 rather than at a block.
    `prompt_ctx_max`: from 8,192 tokens of model length on, the edge rule never raises a context to this many
    blocks or more; None: no such bound.
    """

    strategy: Literal["exponential"] = "exponential"
    version: Literal["vllm-gaudi@091bbad"] = "vllm-gaudi@091bbad"
    contiguous_pa: bool = False
    prompt_query_min_one: bool = False
    prompt_ctx_max: int | None = Field(default=None, ge=1, le=LARGEST_LIMIT)
