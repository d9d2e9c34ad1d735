"""Tables of vllm-hpu-extension and of vllm-gaudi v0.10.1, by version: exponential and linear, in three or two dimensions.

**Three dimensions.** Each query length has its own contexts. Lists ascend and, like upstream's, may hold a bucket
twice. Sources: vllm_hpu_extension/bucketing/exponential.py 30-201, linear.py, and common.py 88-113, at 8211e0b. Linear
ranges are those of ``bucketing.linear``, except that the extension has no value for zero.

**Two dimensions** (Gaudi 1.21). A prompt bucket is a batch size and a query length, a decode bucket a batch size and a
number of blocks. Lists are in the order of these products, then of lengths, so they do not ascend. Sources:
vllm_hpu_extension/bucketing/{linear,exponential}.py at 2b4ba56 and 29bc7a4.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, NamedTuple, Protocol

from aotgaudi.bucketing.combine import is_off_slice_query
from aotgaudi.bucketing.exponential import ExponentialAxis, RangeRule, ceil_log2, exponential_range
from aotgaudi.bucketing.linear import ONE, LinearAxis, linear_range
from aotgaudi.bucketing.strategy import (
    Bucket,
    BucketingInputs,
    check_num_buckets,
    check_num_values,
    collector_paused,
)
from aotgaudi.errors import SpecError
from aotgaudi.spec.bucketing import AxisBounds


class ExtensionSource(Protocol):
    """Chooses the values of each dimension: what distinguishes one strategy from another."""

    def prompt_batch_sizes(self, inputs: BucketingInputs) -> Sequence[int]:
        """Returns the batch sizes of the prompt phase."""
        ...

    def query_lens(self, inputs: BucketingInputs) -> Sequence[int]:
        """Returns the query lengths of the prompt phase."""
        ...

    def contexts(self, query_len: int, inputs: BucketingInputs) -> Sequence[int]:
        """Returns the contexts of a query with prefix caching, in blocks, ascending; some may occur twice."""
        ...

    def decode_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the decode buckets, ascending."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtensionRules:
    """What differs between versions and strategies. The defaults are those of exponential at 8211e0b.

    `limits_query`: a query is at most the model's length. `removes_repetitions`: if the filter leaves anything, each bucket
    occurs once. `slices`: queries that sliced attention cannot run are left out.
    """

    limits_query: bool = True
    removes_repetitions: bool = False
    slices: bool = True


@dataclass(frozen=True, slots=True)
class ExtensionStrategy:
    """A strategy of the extension. See ``strategy.Strategy``."""

    source: ExtensionSource
    rules: ExtensionRules = ExtensionRules()

    def prompt_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the prompt buckets, ascending.

        If no bucket is within the step's tokens, upstream keeps all of them, so that it can serve.
        """
        runs = self._runs(inputs)
        fitting = [run for run in (self._fitting(run, inputs) for run in runs) if run.contexts]
        if fitting and self.rules.removes_repetitions:
            fitting = _without_repetitions(fitting)
        kept = fitting or runs
        if self.rules.slices:
            kept = [run for run in kept if not is_off_slice_query(run.query_len, inputs)]
        return _built(kept)

    def decode_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the decode buckets, ascending."""
        return self.source.decode_table(inputs)

    def decode_seed_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the decode buckets. These versions have no speculative decoding."""
        return self.source.decode_table(inputs)

    def _runs(self, inputs: BucketingInputs) -> list[_Run]:
        batch_sizes = sorted(self.source.prompt_batch_sizes(inputs))
        query_lens = sorted(self.source.query_lens(inputs))
        check_num_buckets(len(batch_sizes) * len(query_lens), "prompt")
        contexts: list[Sequence[int]] = [
            self.source.contexts(query_len, inputs) if inputs.prefix_caching else (0,)
            for query_len in query_lens
        ]
        runs = [
            _Run(batch_size, *query)
            for batch_size in batch_sizes
            for query in zip(query_lens, contexts, strict=True)
        ]
        if not any(contexts):
            raise SpecError(
                "limits.max_model_len",
                f"is {inputs.max_model_len}, which leaves no prompt bucket",
                f"at least block_size {inputs.block_size}",
            )
        return runs

    def _fitting(self, run: _Run, inputs: BucketingInputs) -> _Run:
        """Returns the part of a run that is within the step's tokens. Contexts count as well."""
        if self.rules.limits_query and run.query_len > inputs.max_model_len:
            return run._replace(contexts=())
        most_tokens = inputs.max_num_batched_tokens // run.batch_size
        most_context = (most_tokens - run.query_len) // inputs.block_size
        return run._replace(contexts=run.contexts[: bisect_right(run.contexts, most_context)])


class _Run(NamedTuple):
    """Buckets of one batch size and query length."""

    batch_size: int
    query_len: int
    contexts: Sequence[int]


def _without_repetitions(runs: Iterable[_Run]) -> list[_Run]:
    """Returns each run once, without what its contexts repeat. A range repeats nothing, and may be too long to list."""
    unique = {(run.batch_size, run.query_len): run for run in runs}
    return [
        run if isinstance(run.contexts, range) else run._replace(contexts=sorted(set(run.contexts)))
        for run in unique.values()
    ]


def _built(runs: Iterable[_Run]) -> tuple[Bucket, ...]:
    runs = list(runs)
    check_num_buckets(sum(len(run.contexts) for run in runs), "prompt")
    table: list[Bucket] = []
    with collector_paused():
        for run in runs:
            table.extend(product((run.batch_size,), (run.query_len,), run.contexts))
    table.sort()
    return tuple(table)


_LONG_MODEL_LEN = 8192
"""From this model length on, half of the query lengths are spaced linearly."""

EXTENSION_POINTS = RangeRule(
    special_minima=frozenset(), clips_last=False, fills=True, knows_long_context=True
)
"""How every version of the extension chooses points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtensionExponentialRules:
    """What changed between versions. The defaults are those of 8211e0b.

    `long_context`: for which models half of the query lengths are spaced linearly. `dense_contexts`: a query has every
    context, not only exponentially spaced ones. `heeds_limits`: VLLM_*_BUCKET_LIMIT count.
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
        """Returns the query lengths of the prompt phase, ascending. Raises SpecError for models that are too short."""
        axis = self._axis(inputs.block_size, inputs.block_size, inputs.max_model_len, inputs.prompt.query_len)
        long_context = self.rules.long_context == "always" or (
            self.rules.long_context == "long" and inputs.max_model_len >= _LONG_MODEL_LEN
        )
        return exponential_range(
            axis, EXTENSION_POINTS, contiguous_pa=inputs.contiguous_pa, long_context=long_context
        )

    def contexts(self, query_len: int, inputs: BucketingInputs) -> Sequence[int]:
        """Returns the contexts of a query, ascending. Small ones may occur twice.

        Raises:
            SpecError: the query is longer than the model. Upstream takes the logarithm of a negative number there.
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
        """Returns all combinations as decode buckets, ascending, including those of more sequences than blocks."""
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
    """The linear strategy of the extension. See ``extension.ExtensionSource``.

    `blocks_past_end`: the blocks by which a cached context may exceed the room that the longest query leaves.
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
    batch_size = LinearAxis(1, 32, inputs.max_num_prefill_seqs).bounded(bounds.batch_size)
    query_len = LinearAxis(block_size, block_size, inputs.max_model_len).bounded(bounds.query_len)
    if not inputs.merged_prefill:
        return batch_size, query_len
    longest = min(batch_size.maximum * query_len.maximum, inputs.max_num_batched_tokens)
    return ONE, replace(query_len, maximum=longest)


def decode_axes(inputs: BucketingInputs, blocks_max: int) -> tuple[LinearAxis, LinearAxis]:
    """Returns the batch sizes and the contexts of the decode phase, up to `blocks_max` by default."""
    bounds, block_size = inputs.decode, inputs.block_size
    return (
        LinearAxis(1, 32, inputs.max_num_seqs).bounded(bounds.batch_size),
        LinearAxis(block_size, block_size, blocks_max).bounded(bounds.num_blocks),
    )


def decode_contexts(axis: LinearAxis, inputs: BucketingInputs) -> tuple[int, ...]:
    """Returns the contexts of the decode phase, ascending.

    Under contiguous paged attention they extend to the cache's end, unless the spec sets their maximum.
    """
    where = "bucketing.decode.num_blocks"
    if not inputs.contiguous_pa or inputs.decode.num_blocks.max is not None:
        return extension_range(axis, where)
    contexts = extension_range(replace(axis, maximum=inputs.num_blocks), where)
    return contexts if contexts[-1:] == (inputs.num_blocks,) else (*contexts, inputs.num_blocks)


def cut_contexts(contexts: Sequence[int], num_blocks: int) -> Iterator[int]:
    """Yields contexts. The first one that reaches the cache's end is cut there, and is the last."""
    for context in contexts:
        yield min(context, num_blocks)
        if context >= num_blocks:
            return


def extension_range(axis: LinearAxis, where: str) -> tuple[int, ...]:
    """Returns the values of one dimension. Raises SpecError for a dimension from 0, where upstream loops forever."""
    if axis.minimum < 1:
        raise SpecError(f"{where}.min", f"is {axis.minimum}", "at least 1 in this version")
    return linear_range(axis, where)


_FILLED = RangeRule(special_minima=frozenset(), clips_last=False, fills=True)

Pair = tuple[int, int]
"""A batch size, and a query length or a number of blocks."""


@dataclass(frozen=True, slots=True)
class TwoDimensionalLinear:
    """The linear strategy, the default of 1.21. See ``strategy.Strategy``.

    `knows_contiguous_pa`: under contiguous paged attention, decode contexts extend to the cache's end, and have a block for
    every sequence (29bc7a4).
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
        least = {size: bisect_left(contexts, size) if self.knows_contiguous_pa else 0 for size in batch_sizes}
        return _decode_table(
            (batch_size, context)
            for batch_size in batch_sizes
            for context in cut_contexts(contexts[least[batch_size] :], inputs.num_blocks)
        )

    def decode_seed_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the decode buckets. These versions have no speculative decoding."""
        return self.decode_table(inputs)


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
        """Returns the decode buckets. These versions have no speculative decoding."""
        return self.decode_table(inputs)

    def _range(self, axis: ExponentialAxis, inputs: BucketingInputs) -> tuple[int, ...]:
        return exponential_range(axis, _FILLED, contiguous_pa=inputs.contiguous_pa and self.ends_at_max)


def linear_decode_axes(inputs: BucketingInputs) -> tuple[LinearAxis, LinearAxis]:
    """Returns the batch sizes and the contexts of the linear decode phase, before the cut at the cache's end."""
    return decode_axes(inputs, _most_decode_blocks(inputs))


def exponential_prompt_axes(inputs: BucketingInputs) -> tuple[ExponentialAxis, ExponentialAxis]:
    """Returns the batch sizes and the query lengths. Of the spec's bounds only the limits count."""
    num_seqs, longest, bounds = inputs.max_num_prefill_seqs, inputs.max_model_len, inputs.prompt
    return (
        _axis(1, num_seqs, bounds.batch_size.limit),
        _axis(inputs.block_size, longest, bounds.query_len.limit),
    )


def exponential_decode_axes(inputs: BucketingInputs) -> tuple[ExponentialAxis, ExponentialAxis]:
    """Returns the batch sizes and the contexts, before the cut at the cache's end."""
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
    """Returns the prompt pairs within the step's tokens (and `longest`); all pairs if none is within."""
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
