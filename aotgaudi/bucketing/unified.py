"""Buckets of unified attention, where one step holds prompts and decodes: vllm-gaudi v0.11.2 to v0.17.1.

vllm_gaudi/extension/bucketing/unified.py, and common.py 506-523, at v0.17.1. A range is ``[min, max, turn]``: ten
exponentially spaced points, rounded up to `turn`, in double precision and in this order of operations.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from aotgaudi.bucketing.strategy import BucketingInputs, UnifiedBucket
from aotgaudi.errors import SpecError

_NUM_POINTS = 10


@dataclass(frozen=True, slots=True)
class UnifiedAxis:
    """One dimension: points from `minimum` to `maximum`, multiples of `turn` except at the ends."""

    minimum: int
    maximum: int
    turn: int


@dataclass(frozen=True, slots=True)
class UnifiedAxes:
    """The three dimensions: tokens of a step, blocks that sequences share, and blocks of one sequence each."""

    query_len: UnifiedAxis
    shared_context: UnifiedAxis
    unique_context: UnifiedAxis


class UnifiedRanges:
    """Gives upstream's list. Stateless. See ``strategy.UnifiedStrategy``."""

    def unified_table(self, inputs: BucketingInputs) -> tuple[UnifiedBucket, ...]:
        """Returns the unified buckets, ascending.

        Raises:
            SpecError: steps of one token over shared blocks; upstream divides by zero there.
        """
        axes = unified_axes(inputs)
        ranges = map(unified_range, (axes.query_len, axes.shared_context, axes.unique_context))
        return tuple(
            (query_len, shared, unique, is_causal)
            for query_len, shared, unique in itertools.product(*ranges)
            for is_causal in (0, 1)
            if _keeps(query_len, shared, unique, is_causal, inputs)
        )


def unified_axes(inputs: BucketingInputs) -> UnifiedAxes:
    """Returns the dimensions (unified.py, get_unified_cfgs)."""
    turn = inputs.max_num_seqs
    shared_max = min(inputs.max_model_len // inputs.block_size, inputs.num_blocks)
    return UnifiedAxes(
        UnifiedAxis(1, inputs.max_num_batched_tokens, turn),
        UnifiedAxis(0, shared_max, turn),
        UnifiedAxis(0, inputs.num_blocks, turn),
    )


def unified_range(axis: UnifiedAxis) -> tuple[int, ...]:
    """Returns the points of one dimension, ascending (unified.py, warmup_unified_range)."""
    start = axis.minimum or 1
    points = {_point(start, axis, index) for index in range(_NUM_POINTS - 1)} | {axis.maximum}
    if axis.minimum == 0:
        points.add(0)
    return tuple(sorted(points))


def _point(start: int, axis: UnifiedAxis, index: int) -> int:
    exponent = (1.0 / float(_NUM_POINTS - 1)) * index
    return math.ceil(start * math.pow(axis.maximum / start, exponent) / axis.turn) * axis.turn


def _keeps(query_len: int, shared: int, unique: int, is_causal: int, inputs: BucketingInputs) -> bool:
    """Whether a step is possible. Causal steps hold prompts, the others one token for each of their sequences."""
    shared_tokens = shared * inputs.block_size
    if is_causal:
        return shared_tokens // min(inputs.max_num_seqs, query_len) <= inputs.max_model_len
    if query_len > inputs.max_num_seqs:
        return False
    if shared == 0:
        return unique > 0 and query_len <= unique
    if query_len == 1:
        raise SpecError(
            "limits",
            "give steps of one token over shared blocks, which two sequences share at least",
            "max_num_seqs and max_num_batched_tokens of at least 2, or another strategy",
        )
    return shared_tokens // (query_len // 2) <= inputs.max_model_len
