"""The exponential strategy of vllm-gaudi at 091bbad: vllm_gaudi/extension/bucketing/exponential.py.

Each dimension is ``[min, step, max, limit]``: about `limit` points between `min` and `max`, exponentially
spaced and rounded up to `step`. The tables depend on IEEE double arithmetic in exactly this order of
operations; exact arithmetic gives other tables (``[0, 1, 1024, 11]`` has 9, 17, 65, 129, not powers of two).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from aotgaudi.bucketing.inputs import BucketingInputs, Ranges
from aotgaudi.errors import SpecError

_LONG_MODEL_LEN = 8192
"""From this model length on, the full query length is taken off the largest prompt context."""

_DECODE_CLAMP = 3
"""Decode contexts go up to this many times the cache, for blocks that sequences share."""


@dataclass(frozen=True, slots=True)
class ExponentialAxis:
    """One dimension: `limit` points from `minimum` to `maximum`, multiples of `step`."""

    minimum: int
    step: int
    maximum: int
    limit: int


@dataclass(frozen=True, slots=True)
class ExponentialAxes:
    """The three dimensions of one phase."""

    batch_size: ExponentialAxis
    query_len: ExponentialAxis
    context: ExponentialAxis


class ExponentialStrategy:
    """Ranges of both phases; stateless. See ``versions.Strategy``."""

    def prompt_ranges(self, inputs: BucketingInputs) -> Ranges:
        """Returns the ranges of the prompt phase. Raises SpecError where upstream's rules give none."""
        return _ranges(prompt_axes(inputs), inputs)

    def decode_ranges(self, inputs: BucketingInputs) -> Ranges:
        """Returns the ranges of the decode phase. Raises SpecError where upstream's rules give none."""
        return _ranges(decode_axes(inputs), inputs)


def prompt_axes(inputs: BucketingInputs) -> ExponentialAxes:
    """Returns the prompt dimensions (exponential.py 34-87)."""
    max_seqs, max_tokens = inputs.max_num_prefill_seqs, inputs.max_num_batched_tokens
    ctx_max = _prompt_ctx_max(inputs)
    ctx_limit = 2 if ctx_max == 1 else ceil_log2(ctx_max) + 1
    query_limit = ceil_log2(max_tokens)
    if inputs.merged_prefill:
        return ExponentialAxes(
            ExponentialAxis(1, 1, 1, 1),
            ExponentialAxis(inputs.query_min, 4 * inputs.block_size, max_tokens, query_limit),
            ExponentialAxis(0, 4, ctx_max * max_seqs, ctx_limit),
        )
    return ExponentialAxes(
        ExponentialAxis(1, 2, max_seqs, ceil_log2(max_seqs) + 1),
        ExponentialAxis(inputs.query_min, inputs.block_size, max_tokens, query_limit),
        ExponentialAxis(0, 1, ctx_max, ctx_limit),
    )


def decode_axes(inputs: BucketingInputs) -> ExponentialAxes:
    """Returns the decode dimensions (exponential.py 89-137)."""
    max_seqs, cache_blocks = inputs.max_num_seqs, inputs.num_blocks
    clamp = _DECODE_CLAMP * cache_blocks
    blocks_max = inputs.max_blocks_per_seq * max_seqs
    if inputs.contiguous_pa:
        blocks_max = min(cache_blocks, blocks_max)
    elif not inputs.skip_decode_block_clamp:
        blocks_max = min(blocks_max, clamp)
    limit = ceil_log2(blocks_max) + 1
    if not inputs.contiguous_pa and blocks_max > clamp:
        limit += ceil_log2(blocks_max / clamp) + 1
    return ExponentialAxes(
        ExponentialAxis(1, 2, max_seqs, ceil_log2(max_seqs) + 1),
        ExponentialAxis(1, 1, 1, 1),
        ExponentialAxis(1, max_seqs, blocks_max, limit),
    )


def exponential_range(axis: ExponentialAxis, *, contiguous_pa: bool) -> tuple[int, ...]:
    """Returns the points of one dimension, ascending (exponential.py 144-203).

    The last two may be equal: a last point above `maximum` is replaced by it.

    Raises:
        SpecError: the axis has no points (`limit` below 1); upstream fails an assertion there.
    """
    if axis.limit < 1:
        raise SpecError(
            "limits",
            f"leave no query lengths between {axis.minimum} and {axis.maximum}",
            "max_num_batched_tokens of at least 2",
        )
    if axis.limit == 1:
        return (axis.maximum,)
    start = axis.step if axis.minimum in (0, 1) else axis.minimum
    points = {_point(start, axis, index) for index in range(axis.limit)}
    if contiguous_pa:
        points = {_point(start, axis, index) for index in range(axis.limit - 1)} | {axis.maximum}
    if axis.minimum in (0, 1):
        points.add(axis.minimum)
    *head, last = sorted(points)
    return (*head, min(last, axis.maximum))


def ceil_log2(value: float) -> int:
    """Returns ``ceil(log2(value))``, in floating point as upstream does."""
    return math.ceil(math.log2(value))


def _point(start: int, axis: ExponentialAxis, index: int) -> int:
    exponent = (1.0 / float(axis.limit - 1)) * index
    return math.ceil(start * math.pow(axis.maximum / start, exponent) / axis.step) * axis.step


def _prompt_ctx_max(inputs: BucketingInputs) -> int:
    reserved = inputs.query_min
    if inputs.max_model_len >= _LONG_MODEL_LEN:
        reserved = inputs.max_num_batched_tokens
    return max(1, (inputs.max_model_len - reserved) // inputs.block_size)


def _ranges(axes: ExponentialAxes, inputs: BucketingInputs) -> Ranges:
    return Ranges(
        *(
            exponential_range(axis, contiguous_pa=inputs.contiguous_pa)
            for axis in (axes.batch_size, axes.query_len, axes.context)
        )
    )
