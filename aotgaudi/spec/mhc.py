"""Hyper-connections (mHC): which token counts are warm."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from aotgaudi.spec.base import SpecValue
from aotgaudi.spec.limits import LARGEST_LIMIT

MhcRule = Literal["sglang-pr25810", "sglang-deepgemm-off", "sglang-fma", "vllm-collapsed"]


class MhcSpec(SpecValue):
    """Which rule chooses the token counts, and up to where.

    `enabled`: None is as upstream gates it: a model with hyper-connections on a CUDA target. True asks for
    them on any target; it needs the target's `num_sms`. `max_num_tokens`: None is
    ``limits.max_num_batched_tokens``.
    """

    enabled: bool | None = None
    rule: MhcRule = "sglang-pr25810"
    max_num_tokens: int | None = Field(default=None, ge=1, le=LARGEST_LIMIT)
