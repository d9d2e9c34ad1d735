"""The exponential strategy of vllm-gaudi: vllm_gaudi/extension/bucketing/exponential.py, by version.

Each dimension is ``[min, step, max, limit]``: about `limit` points between `min` and `max`, exponentially
spaced and rounded up to `step`. The versions differ in how points are chosen (`RangeRule`) and in the ends of
the dimensions (`ExponentialRules`). Lines are those of 091bbad. The older, extension form of the strategy
shares the range; see ``bucketing.extension``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aotgaudi.bucketing.exponential_range import (
    ExponentialAxes,
    ExponentialAxis,
    RangeRule,
    ceil_log2,
    exponential_range,
)
from aotgaudi.bucketing.strategy import BucketingInputs, Ranges

_LONG_MODEL_LEN = 8192
"""From this model length on, the full query length is taken off the largest prompt context."""

_SHARING = 3
"""Decode contexts go up to this many times the cache, for blocks that sequences share."""

_NEWEST_POINTS = RangeRule()

DecodeMax = Callable[[BucketingInputs], int]
"""The most blocks of a decode."""

DecodeLimit = Callable[[BucketingInputs, int], int]
"""About how many points lie below the most blocks, which is the second argument."""


def sequences_within_cache(inputs: BucketingInputs) -> int:
    """Returns the whole blocks of all sequences, or the cache where that is less (v0.11.2, v0.13.0)."""
    return min(_whole_blocks(inputs), inputs.num_blocks)


def sequences_within_quarter(inputs: BucketingInputs) -> int:
    """Returns the whole blocks of all sequences, or a quarter of a cache for each (v0.14.1, v0.16.0)."""
    return min(_whole_blocks(inputs), inputs.num_blocks * inputs.max_num_seqs // 4)


def shared_cache(inputs: BucketingInputs) -> int:
    """Returns thrice the cache (v0.17.1, v0.20.0rc0)."""
    return _SHARING * inputs.num_blocks


def sequences_or_shared_cache(inputs: BucketingInputs) -> int:
    """Returns the sequences' blocks, up to a third of a cache for each, but thrice the cache (v0.19.1)."""
    bounded = min(_padded_blocks(inputs), inputs.num_blocks * inputs.max_num_seqs // 3)
    return max(bounded, shared_cache(inputs))


def all_sequences(inputs: BucketingInputs) -> int:
    """Returns the blocks of all sequences (v0.21.0, v0.24.0)."""
    return _padded_blocks(inputs)


def sequences_within_shared_cache(inputs: BucketingInputs) -> int:
    """Returns the blocks of all sequences, or thrice the cache where that is less, unless asked not to."""
    if inputs.skip_decode_block_clamp:
        return _padded_blocks(inputs)
    return min(_padded_blocks(inputs), shared_cache(inputs))


def limit_of_cache(inputs: BucketingInputs, _blocks_max: int) -> int:
    """Returns the doublings to the cache and one more (up to v0.16.0)."""
    return ceil_log2(inputs.num_blocks) + 1


def limit_of_blocks(_inputs: BucketingInputs, blocks_max: int) -> int:
    """Returns the doublings to the most blocks and one more (v0.17.1, v0.19.1, v0.21.0)."""
    return ceil_log2(blocks_max) + 1


def limit_of_few_blocks(inputs: BucketingInputs, blocks_max: int) -> int:
    """Returns the same, but at most 6 or as many as there are batch sizes (v0.20.0rc0)."""
    return min(ceil_log2(blocks_max) + 1, max(6, ceil_log2(inputs.max_num_seqs) + 1))


def limit_of_wide_blocks(inputs: BucketingInputs, blocks_max: int) -> int:
    """Returns the same, and more beyond what sequences are expected to share (from v0.24.0)."""
    limit, shared = ceil_log2(blocks_max) + 1, shared_cache(inputs)
    if not inputs.contiguous_pa and blocks_max > shared:
        limit += ceil_log2(blocks_max / shared) + 1
    return limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentialRules:
    """What changed between versions; the defaults are those of 091bbad.

    `heeds_query_min`: VLLM_PROMPT_QUERY_BUCKET_MIN=1 counts. `shortens_long_contexts`: from a model length of
    8192 on, the largest prompt context leaves room for a whole step. `decode_max` is without contiguous paged
    attention; with it the most blocks are the cache, or fewer where sequences have fewer and
    `contiguous_within_sequences`.
    """

    points: RangeRule = _NEWEST_POINTS
    heeds_query_min: bool = True
    shortens_long_contexts: bool = True
    decode_max: DecodeMax = sequences_within_shared_cache
    decode_limit: DecodeLimit = limit_of_wide_blocks
    contiguous_within_sequences: bool = True


@dataclass(frozen=True, slots=True)
class ExponentialRanges:
    """Ranges of both phases. See ``combine.RangeSource``."""

    rules: ExponentialRules = ExponentialRules()

    def prompt_ranges(self, inputs: BucketingInputs) -> Ranges:
        """Returns the ranges of the prompt phase. Raises SpecError where upstream's rules give none."""
        return self._ranges(self.prompt_axes(inputs), inputs)

    def decode_ranges(self, inputs: BucketingInputs) -> Ranges:
        """Returns the ranges of the decode phase. Raises SpecError where upstream's rules give none."""
        return self._ranges(self.decode_axes(inputs), inputs)

    def prompt_axes(self, inputs: BucketingInputs) -> ExponentialAxes:
        """Returns the prompt dimensions (exponential.py 34-87)."""
        max_seqs, max_tokens = inputs.max_num_prefill_seqs, inputs.max_num_batched_tokens
        query_min = inputs.query_min if self.rules.heeds_query_min else inputs.block_size
        ctx_max = self._prompt_ctx_max(query_min, inputs)
        ctx_limit = 2 if ctx_max == 1 else ceil_log2(ctx_max) + 1
        query_limit = ceil_log2(max_tokens)
        if inputs.merged_prefill:
            return ExponentialAxes(
                ExponentialAxis(1, 1, 1, 1),
                ExponentialAxis(query_min, 4 * inputs.block_size, max_tokens, query_limit),
                ExponentialAxis(0, 4, ctx_max * max_seqs, ctx_limit),
            )
        return ExponentialAxes(
            ExponentialAxis(1, 2, max_seqs, ceil_log2(max_seqs) + 1),
            ExponentialAxis(query_min, inputs.block_size, max_tokens, query_limit),
            ExponentialAxis(0, 1, ctx_max, ctx_limit),
        )

    def decode_axes(self, inputs: BucketingInputs) -> ExponentialAxes:
        """Returns the decode dimensions (exponential.py 89-137). Raises SpecError when they hold no block."""
        max_seqs = inputs.max_num_seqs
        blocks_max = self._decode_max(inputs)
        limit = self.rules.decode_limit(inputs, blocks_max)
        return ExponentialAxes(
            ExponentialAxis(1, 2, max_seqs, ceil_log2(max_seqs) + 1),
            ExponentialAxis(1, 1, 1, 1),
            ExponentialAxis(1, max_seqs, blocks_max, limit),
        )

    def _prompt_ctx_max(self, query_min: int, inputs: BucketingInputs) -> int:
        reserved = query_min
        if self.rules.shortens_long_contexts and inputs.max_model_len >= _LONG_MODEL_LEN:
            reserved = inputs.max_num_batched_tokens
        return max(1, (inputs.max_model_len - reserved) // inputs.block_size)

    def _decode_max(self, inputs: BucketingInputs) -> int:
        if not inputs.contiguous_pa:
            return self.rules.decode_max(inputs)
        if self.rules.contiguous_within_sequences:
            return min(inputs.num_blocks, _padded_blocks(inputs))
        return inputs.num_blocks

    def _ranges(self, axes: ExponentialAxes, inputs: BucketingInputs) -> Ranges:
        found = (
            exponential_range(axis, self.rules.points, contiguous_pa=inputs.contiguous_pa)
            for axis in (axes.batch_size, axes.query_len, axes.context)
        )
        return Ranges(*(tuple(sorted(values)) for values in found))


def _whole_blocks(inputs: BucketingInputs) -> int:
    return inputs.max_model_len // inputs.block_size * inputs.max_num_seqs


def _padded_blocks(inputs: BucketingInputs) -> int:
    return inputs.max_blocks_per_seq * inputs.max_num_seqs
