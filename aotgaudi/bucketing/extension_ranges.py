"""The strategies of vllm-hpu-extension, and of vllm-gaudi v0.10.1, by version: exponential and linear.

Source: vllm_hpu_extension/bucketing/exponential.py 30-201 and linear.py, at 8211e0b. Linear ranges are those of vllm-gaudi
(`bucketing.linear`), but for zero, which the extension has no value for. `bucketing.extension` combines them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from aotgaudi.bucketing.exponential_range import ExponentialAxis, RangeRule, ceil_log2, exponential_range
from aotgaudi.bucketing.linear import ONE, LinearAxis, linear_range
from aotgaudi.bucketing.strategy import Bucket, BucketingInputs, check_num_buckets, check_num_values
from aotgaudi.errors import SpecError
from aotgaudi.spec.bucketing import AxisBounds

_LONG_MODEL_LEN = 8192
"""From this model length on, half of the query lengths are spaced linearly."""

EXTENSION_POINTS = RangeRule(
    special_minima=frozenset(), clips_last=False, fills=True, knows_long_context=True
)
"""How every version of the extension chooses points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtensionExponentialRules:
    """What changed between versions; the defaults are those of 8211e0b.

    `long_context`: for which models half of the query lengths are spaced linearly. `dense_contexts`: a query
    has every context, rather than exponentially spaced ones. `heeds_limits`: VLLM_*_BUCKET_LIMIT count.
    """

    batch_size_step: int = 2
    long_context: Literal["never", "long", "always"] = "long"
    dense_contexts: bool = False
    heeds_limits: bool = False


@dataclass(frozen=True, slots=True)
class ExtensionExponential:
    """Values of both phases. See ``extension.ExtensionSource``."""

    rules: ExtensionExponentialRules = ExtensionExponentialRules()

    def prompt_batch_sizes(self, inputs: BucketingInputs) -> Sequence[int]:
        """Returns the batch sizes of the prompt phase, ascending."""
        return self._batch_sizes(inputs.max_num_prefill_seqs, inputs.prompt.batch_size, inputs)

    def query_lens(self, inputs: BucketingInputs) -> Sequence[int]:
        """Returns the query lengths of the prompt phase, ascending. Raises SpecError for too short models."""
        axis = self._axis(inputs.block_size, inputs.block_size, inputs.max_model_len, inputs.prompt.query_len)
        long_context = self.rules.long_context == "always" or (
            self.rules.long_context == "long" and inputs.max_model_len >= _LONG_MODEL_LEN
        )
        return exponential_range(
            axis, EXTENSION_POINTS, contiguous_pa=inputs.contiguous_pa, long_context=long_context
        )

    def contexts(self, query_len: int, inputs: BucketingInputs) -> Sequence[int]:
        """Returns the contexts of a query, ascending; small ones may be there twice.

        Raises:
            SpecError: the query is longer than the model, where upstream takes the logarithm of that.
        """
        most = (inputs.max_model_len - query_len) // inputs.block_size
        if self.rules.dense_contexts:
            return range(most + 1)
        if most < 0:
            raise SpecError(
                "limits.max_model_len",
                f"is {inputs.max_model_len}, shorter than the prompt bucket of {query_len} tokens",
                f"a multiple of block_size {inputs.block_size}",
            )
        if most == 0:
            return (0,)
        num_points = ceil_log2(most) + 1
        share = 1 / float(num_points)
        return (0, *(math.ceil(math.pow(most, share * index)) for index in range(1, num_points + 1)))

    def decode_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the decode buckets, ascending: all combinations, also of more sequences than blocks."""
        batch_sizes = self._batch_sizes(inputs.max_num_seqs, inputs.decode.batch_size, inputs)
        axis = self._axis(inputs.block_size, inputs.block_size, inputs.num_blocks, inputs.decode.num_blocks)
        blocks = exponential_range(axis, EXTENSION_POINTS, contiguous_pa=inputs.contiguous_pa)
        check_num_buckets(len(batch_sizes) * len(blocks), "decode")
        return tuple(product(batch_sizes, (1,), blocks))

    def _batch_sizes(self, most: int, bounds: AxisBounds, inputs: BucketingInputs) -> tuple[int, ...]:
        axis = self._axis(1, self.rules.batch_size_step, most, bounds)
        return exponential_range(axis, EXTENSION_POINTS, contiguous_pa=inputs.contiguous_pa)

    def _axis(self, minimum: int, step: int, maximum: int, bounds: AxisBounds) -> ExponentialAxis:
        limit = ceil_log2(maximum) + 1
        if self.rules.heeds_limits and bounds.limit is not None:
            limit = bounds.limit
        return ExponentialAxis(minimum, step, maximum, limit)


@dataclass(frozen=True, slots=True)
class ExtensionLinear:
    """See ``extension.ExtensionSource``.

    `blocks_past_end`: a cached context may be so many blocks longer than the longest query has room for.
    """

    blocks_past_end: int = 1

    def prompt_batch_sizes(self, inputs: BucketingInputs) -> Sequence[int]:
        """Returns the batch sizes of the prompt phase, ascending."""
        return extension_range(prompt_axes(inputs)[0], "bucketing.prompt.batch_size")

    def query_lens(self, inputs: BucketingInputs) -> Sequence[int]:
        """Returns the query lengths of the prompt phase, ascending."""
        return extension_range(prompt_axes(inputs)[1], "bucketing.prompt.query_len")

    def contexts(self, query_len: int, inputs: BucketingInputs) -> Sequence[int]:
        """Returns the contexts of a query with prefix caching: every number of blocks (linear.py 135-144)."""
        room = (prompt_axes(inputs)[1].maximum - query_len) // inputs.block_size
        check_num_values(room, "bucketing.prompt.num_ctx_blocks")
        return range(room + self.blocks_past_end + 1)

    def decode_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the decode buckets, ascending (linear.py 57-79 and 193-218)."""
        batch_axis, _ = axes = decode_axes(inputs, inputs.num_blocks)
        batch_sizes = extension_range(batch_axis, "bucketing.decode.batch_size")
        contexts = decode_contexts(axes[1], inputs)
        check_num_buckets(len(batch_sizes) * len(contexts), "decode")
        return tuple(
            (batch_size, 1, context)
            for batch_size in batch_sizes
            for context in cut_contexts(contexts[bisect_left(contexts, batch_size) :], inputs.num_blocks)
        )


def prompt_axes(inputs: BucketingInputs) -> tuple[LinearAxis, LinearAxis]:
    """Returns the batch sizes and the query lengths of the prompt phase (linear.py 23-40)."""
    block_size, bounds = inputs.block_size, inputs.prompt
    batch_size = LinearAxis.bounded(bounds.batch_size, 1, 32, inputs.max_num_prefill_seqs)
    query_len = LinearAxis.bounded(bounds.query_len, block_size, block_size, inputs.max_model_len)
    if not inputs.merged_prefill:
        return batch_size, query_len
    longest = min(batch_size.maximum * query_len.maximum, inputs.max_num_batched_tokens)
    return ONE, replace(query_len, maximum=longest)


def decode_axes(inputs: BucketingInputs, blocks_max: int) -> tuple[LinearAxis, LinearAxis]:
    """Returns the batch sizes and the contexts of the decode phase, up to `blocks_max` by default."""
    bounds, block_size = inputs.decode, inputs.block_size
    return (
        LinearAxis.bounded(bounds.batch_size, 1, 32, inputs.max_num_seqs),
        LinearAxis.bounded(bounds.num_blocks, block_size, block_size, blocks_max),
    )


def decode_contexts(axis: LinearAxis, inputs: BucketingInputs) -> tuple[int, ...]:
    """Returns the contexts of the decode phase, ascending.

    Under contiguous paged attention they reach the cache's end, unless a person says how far they go.
    """
    where = "bucketing.decode.num_blocks"
    if not inputs.contiguous_pa or inputs.decode.num_blocks.max is not None:
        return extension_range(axis, where)
    contexts = extension_range(replace(axis, maximum=inputs.num_blocks), where)
    return contexts if contexts[-1:] == (inputs.num_blocks,) else (*contexts, inputs.num_blocks)


def cut_contexts(contexts: Sequence[int], num_blocks: int) -> Iterator[int]:
    """Yields contexts; the first one that reaches the cache's end is cut there, and is the last."""
    for context in contexts:
        yield min(context, num_blocks)
        if context >= num_blocks:
            return


def extension_range(axis: LinearAxis, where: str) -> tuple[int, ...]:
    """Returns the values of one dimension. Raises SpecError for one from 0, where upstream does not end."""
    if axis.minimum < 1:
        raise SpecError(f"{where}.min", f"is {axis.minimum}", "at least 1 in this version")
    return linear_range(axis, where)
