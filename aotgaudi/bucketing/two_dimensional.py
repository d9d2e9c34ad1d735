"""The two-dimensional tables of Gaudi 1.21: vllm_hpu_extension/bucketing/{linear,exponential}.py, 2b4ba56 and 29bc7a4.

A prompt bucket is a batch size and a query length, a decode bucket a batch size and a number of blocks. A list is
in the order of their products, then of lengths: upstream's own, which does not ascend.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from aotgaudi.bucketing.exponential_range import ExponentialAxis, RangeRule, ceil_log2, exponential_range
from aotgaudi.bucketing.extension_ranges import (
    cut_contexts,
    decode_axes,
    decode_contexts,
    extension_range,
    prompt_axes,
)
from aotgaudi.bucketing.linear import LinearAxis
from aotgaudi.bucketing.strategy import Bucket, BucketingInputs, check_num_buckets

_FILLED = RangeRule(special_minima=frozenset(), clips_last=False, fills=True)

Pair = tuple[int, int]
"""A batch size, and a query length or a number of blocks."""


@dataclass(frozen=True, slots=True)
class TwoDimensionalLinear:
    """The linear strategy, the default of 1.21. See ``strategy.Strategy``.

    `knows_contiguous_pa`: decode contexts reach the cache's end under contiguous paged attention, and have a block
    for every sequence (29bc7a4).
    """

    knows_contiguous_pa: bool

    def prompt_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the prompt buckets (linear.py 233-276)."""
        batch_axis, query_axis = prompt_axes(inputs)
        batch_sizes = extension_range(batch_axis, "bucketing.prompt.batch_size")
        query_lens = extension_range(query_axis, "bucketing.prompt.query_len")
        return _prompt_table(_within_tokens(_pairs(batch_sizes, query_lens, "prompt"), inputs))

    def decode_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the decode buckets (linear.py 278-304)."""
        batch_axis, block_axis = linear_decode_axes(inputs)
        batch_sizes = extension_range(batch_axis, "bucketing.decode.batch_size")
        if self.knows_contiguous_pa:
            contexts = decode_contexts(block_axis, inputs)
        else:
            contexts = extension_range(block_axis, "bucketing.decode.num_blocks")
        check_num_buckets(len(batch_sizes) * len(contexts), "decode")
        return _decode_table(
            (batch_size, context)
            for batch_size in batch_sizes
            for context in cut_contexts(self._possible(contexts, batch_size), inputs.num_blocks)
        )

    def decode_seed_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the decode buckets: there is no speculative decoding in these versions."""
        return self.decode_table(inputs)

    def _possible(self, contexts: Sequence[int], batch_size: int) -> Sequence[int]:
        return contexts[bisect_left(contexts, batch_size) :] if self.knows_contiguous_pa else contexts


@dataclass(frozen=True, slots=True)
class TwoDimensionalExponential:
    """The exponential strategy of 1.21. See ``strategy.Strategy``.

    `ends_at_max`: under contiguous paged attention the last point is the maximum itself (29bc7a4).
    """

    ends_at_max: bool

    def prompt_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the prompt buckets (exponential.py 226-270)."""
        batch_axis, query_axis = exponential_prompt_axes(inputs)
        pairs = _pairs(self._range(batch_axis, inputs), self._range(query_axis, inputs), "prompt")
        return _prompt_table(_within_tokens(pairs, inputs, longest=inputs.max_model_len))

    def decode_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the decode buckets: all products, up to the cache's end (exponential.py 273-309)."""
        batch_axis, block_axis = exponential_decode_axes(inputs)
        contexts = self._range(replace(block_axis, maximum=inputs.num_blocks), inputs)
        return _decode_table(_pairs(self._range(batch_axis, inputs), contexts, "decode"))

    def decode_seed_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the decode buckets: there is no speculative decoding in these versions."""
        return self.decode_table(inputs)

    def _range(self, axis: ExponentialAxis, inputs: BucketingInputs) -> tuple[int, ...]:
        return exponential_range(axis, _FILLED, contiguous_pa=inputs.contiguous_pa and self.ends_at_max)


def linear_decode_axes(inputs: BucketingInputs) -> tuple[LinearAxis, LinearAxis]:
    """Returns the batch sizes and the contexts of the linear decode phase, before the cache's end counts."""
    return decode_axes(inputs, _most_decode_blocks(inputs))


def exponential_prompt_axes(inputs: BucketingInputs) -> tuple[ExponentialAxis, ExponentialAxis]:
    """Returns the batch sizes and the query lengths; of a person's bounds only the limits count."""
    num_seqs, longest, bounds = inputs.max_num_prefill_seqs, inputs.max_model_len, inputs.prompt
    return (
        _axis(1, num_seqs, bounds.batch_size.limit),
        _axis(inputs.block_size, longest, bounds.query_len.limit),
    )


def exponential_decode_axes(inputs: BucketingInputs) -> tuple[ExponentialAxis, ExponentialAxis]:
    """Returns the batch sizes and the contexts, before the cache's end counts."""
    bounds = inputs.decode
    return (
        _axis(1, inputs.max_num_seqs, bounds.batch_size.limit),
        _axis(inputs.block_size, _most_decode_blocks(inputs), bounds.num_blocks.limit),
    )


def _axis(step: int, maximum: int, limit: int | None) -> ExponentialAxis:
    return ExponentialAxis(step, step, maximum, ceil_log2(maximum) + 1 if limit is None else limit)


def _most_decode_blocks(inputs: BucketingInputs) -> int:
    return max(inputs.block_size, inputs.max_num_seqs * inputs.max_model_len // inputs.block_size)


def _pairs(batch_sizes: Sequence[int], lengths: Sequence[int], phase: str) -> list[Pair]:
    check_num_buckets(len(batch_sizes) * len(lengths), phase)
    return list(product(batch_sizes, lengths))


def _within_tokens(pairs: list[Pair], inputs: BucketingInputs, longest: int | None = None) -> list[Pair]:
    """Returns the prompt pairs within the step's tokens (and `longest`); all, where that leaves none."""
    max_tokens = inputs.max_num_batched_tokens
    within = [
        pair for pair in pairs if pair[0] * pair[1] <= max_tokens and (longest is None or pair[1] <= longest)
    ]
    return within or pairs


def _prompt_table(pairs: Iterable[Pair]) -> tuple[Bucket, ...]:
    return tuple((batch_size, query_len, 0) for batch_size, query_len in sorted(pairs, key=_rank))


def _decode_table(pairs: Iterable[Pair]) -> tuple[Bucket, ...]:
    return tuple((batch_size, 1, context) for batch_size, context in sorted(pairs, key=_rank))


def _rank(pair: Pair) -> tuple[int, int, int]:
    batch_size, length = pair
    return batch_size * length, length, batch_size
