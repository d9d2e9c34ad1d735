"""The exponential strategy of vllm-gaudi, by version.

Sources: vllm-gaudi at 091bbad, vllm_gaudi/extension/bucketing/exponential.py; vllm-hpu-extension at 8211e0b,
vllm_hpu_extension/bucketing/exponential.py 203-320. Line numbers below are those of 091bbad.

Each dimension is ``[min, step, max, limit]``: about `limit` points between `min` and `max`, exponentially spaced and
rounded up to `step`. Versions differ in how they choose points (`RangeRule`) and where the dimensions end
(`ExponentialRules`). The extension has another form of this strategy over the same points: ``bucketing.extension``.

Points depend on IEEE double arithmetic in exactly this order of operations. Exact arithmetic gives other tables:
``[0, 1, 1024, 11]`` has 9, 17, 65, 129, not powers of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from aotgaudi.bucketing.strategy import BucketingInputs, Ranges, check_num_values
from aotgaudi.errors import SpecError


@dataclass(frozen=True, slots=True)
class ExponentialAxis:
    """One dimension: about `limit` points from `minimum` to `maximum`, multiples of `step`."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRule:
    """How points are chosen. The defaults are those of vllm-gaudi at 091bbad.

    `special_minima`: minima that are an additional point, so that the spacing starts at the step. `clips_last`: a last point
    above the maximum becomes the maximum. `fills`: a point that is already taken is replaced by the free multiple nearest to
    the unrounded point. `knows_long_context`: in a long context, half of the points are spaced linearly.
    """

    special_minima: frozenset[int] = frozenset({0, 1})
    clips_last: bool = True
    fills: bool = False
    knows_long_context: bool = False


def exponential_range(
    axis: ExponentialAxis, rule: RangeRule, *, contiguous_pa: bool, long_context: bool = False
) -> tuple[int, ...]:
    """Returns the points of one dimension, ascending, except that `maximum` may replace the last one.

    The last two may therefore be equal. If `maximum` is below the start, the last may be less than the one before.

    Raises:
        SpecError: the axis has no points, too many, or too few for a linear half (upstream divides by zero).
    """
    _check_axis(axis, rule)
    if axis.limit == 1:
        return (axis.maximum,)
    is_special = axis.minimum in rule.special_minima
    start = axis.step if is_special else axis.minimum
    if long_context and rule.knows_long_context:
        points = _long_points(start, axis, rule)
    else:
        points = _collected(
            _exponential(start, axis, axis.maximum, axis.limit, contiguous_pa), start, axis, rule
        )
    if is_special:
        points.add(axis.minimum)
    *head, last = sorted(points)
    return (*head, min(last, axis.maximum) if rule.clips_last else last)


def ceil_log2(value: float) -> int:
    """Returns ``ceil(log2(value))``, in floating point as upstream does."""
    return math.ceil(math.log2(value))


def _check_axis(axis: ExponentialAxis, rule: RangeRule) -> None:
    if axis.limit < 1:
        raise SpecError(
            "limits",
            f"leave no query lengths between {axis.minimum} and {axis.maximum}",
            "max_num_batched_tokens of at least 2",
        )
    if axis.minimum < 1 and axis.minimum not in rule.special_minima:
        raise SpecError("bucketing", f"has a dimension from {axis.minimum}", "from 1 in this version")
    num_multiples = max(0, axis.maximum - axis.minimum) // axis.step + 1
    check_num_values(min(axis.limit, num_multiples) if rule.fills else axis.limit, "bucketing")


def _exponential(
    start: int, axis: ExponentialAxis, last: float, limit: int, contiguous_pa: bool
) -> Iterator[tuple[float, int]]:
    """Yields `limit` points from `start` to `last`, as computed and as rounded."""
    for index in range(limit):
        exponent = (1.0 / float(limit - 1)) * index
        exact = start * math.pow(last / start, exponent)
        if contiguous_pa and index == axis.limit - 1:
            yield exact, axis.maximum
        else:
            yield exact, _rounded(exact, axis)


def _collected(
    points: Iterator[tuple[float, int]], start: int, axis: ExponentialAxis, rule: RangeRule
) -> set[int]:
    if not rule.fills:
        return {rounded for _, rounded in points}
    multiples = _FreeMultiples(start, axis)
    for exact, rounded in points:
        nearest = rounded if rounded not in multiples.taken else multiples.nearest(exact)
        if nearest is None:
            break
        multiples.take(nearest)
    return multiples.taken


def _long_points(start: int, axis: ExponentialAxis, rule: RangeRule) -> set[int]:
    """Returns exponential points up to ``maximum / limit``, and linear ones, unfilled, above."""
    num_exponential = axis.limit // 2
    if num_exponential == 1:
        raise SpecError(
            "limits.max_model_len",
            f"is {axis.maximum}, too short for this version's spacing of long contexts",
            "another bucketing.version",
        )
    first = axis.maximum / axis.limit
    points = _collected(_exponential(start, axis, first, num_exponential, False), start, axis, rule)
    num_linear = axis.limit - num_exponential
    step = (axis.maximum - first) / num_linear
    return points | {_rounded(first + index * step, axis) for index in range(1, num_linear + 1)}


def _rounded(exact: float, axis: ExponentialAxis) -> int:
    return math.ceil(exact / axis.step) * axis.step


class _FreeMultiples:
    """The values ``start, start + step, ... <= maximum`` that are not taken.

    Each index points to the next candidate below and above. Walking a path shortens it, so taking all of n values costs
    about n steps.
    """

    def __init__(self, start: int, axis: ExponentialAxis) -> None:
        self.taken: set[int] = set()
        self._start, self._step = start, axis.step
        self._num_values = max(0, (axis.maximum - start) // axis.step + 1)
        self._next = {-1: dict[int, int](), 1: dict[int, int]()}

    def take(self, value: int) -> None:
        """Marks a value as taken. It need not be one of the multiples."""
        self.taken.add(value)
        index, rest = divmod(value - self._start, self._step)
        if rest == 0 and 0 <= index < self._num_values:
            for direction, following in self._next.items():
                following[index] = index + direction

    def nearest(self, exact: float) -> int | None:
        """Returns the free value nearest to `exact`, the smaller one of a tie; None if all are taken."""
        at = min(max(math.floor((exact - self._start) / self._step), -1), self._num_values - 1)
        indices = (self._free(at, -1), self._free(at + 1, 1))
        values = [self._start + i * self._step for i in indices if 0 <= i < self._num_values]
        return min(values, key=lambda value: abs(value - exact), default=None)

    def _free(self, index: int, direction: int) -> int:
        """Returns the first free index from `index` on. It may lie outside the values."""
        following = self._next[direction]
        path = []
        while index in following:
            path.append(index)
            index = following[index]
        following.update(dict.fromkeys(path, index))
        return index


_LONG_MODEL_LEN = 8192
"""From this model length on, the whole query length is subtracted from the largest prompt context."""

_SHARING = 3
"""Decode contexts may have this many times the cache's blocks, because sequences share blocks."""

_NEWEST_POINTS = RangeRule()

DecodeMax = Callable[[BucketingInputs], int]
"""The most blocks of a decode."""

DecodeLimit = Callable[[BucketingInputs, int], int]
"""Returns about how many points to put below the most blocks, which are the second argument."""


def sequences_within_cache(inputs: BucketingInputs) -> int:
    """Returns the whole blocks of all sequences, at most the cache's (v0.11.2, v0.13.0)."""
    return min(_whole_blocks(inputs), inputs.num_blocks)


def sequences_within_quarter(inputs: BucketingInputs) -> int:
    """Returns the whole blocks of all sequences, at most a quarter of a cache for each (v0.14.1, v0.16.0)."""
    return min(_whole_blocks(inputs), inputs.num_blocks * inputs.max_num_seqs // 4)


def shared_cache(inputs: BucketingInputs) -> int:
    """Returns three times the cache (v0.17.1, v0.20.0rc0)."""
    return _SHARING * inputs.num_blocks


def sequences_or_shared_cache(inputs: BucketingInputs) -> int:
    """Returns the sequences' blocks, at most a third of a cache for each, but at least three times the cache (v0.19.1)."""
    bounded = min(all_sequences(inputs), inputs.num_blocks * inputs.max_num_seqs // 3)
    return max(bounded, shared_cache(inputs))


def all_sequences(inputs: BucketingInputs) -> int:
    """Returns the blocks of all sequences (v0.21.0, v0.24.0, v0.26.0)."""
    return inputs.max_blocks_per_seq * inputs.max_num_seqs


def sequences_within_shared_cache(inputs: BucketingInputs) -> int:
    """Returns the blocks of all sequences, at most three times the cache unless that clamp is off."""
    if inputs.skip_decode_block_clamp:
        return all_sequences(inputs)
    return min(all_sequences(inputs), shared_cache(inputs))


def limit_of_cache(inputs: BucketingInputs, _blocks_max: int) -> int:
    """Returns one more than the doublings from one block to the cache (up to v0.16.0)."""
    return ceil_log2(inputs.num_blocks) + 1


def limit_of_blocks(_inputs: BucketingInputs, blocks_max: int) -> int:
    """Returns one more than the doublings from one block to the most blocks (v0.17.1, v0.19.1, v0.21.0)."""
    return ceil_log2(blocks_max) + 1


def limit_of_few_blocks(inputs: BucketingInputs, blocks_max: int) -> int:
    """Returns the result of `limit_of_blocks`, at most 6 or, if larger, the number of batch sizes (v0.20.0rc0)."""
    return min(ceil_log2(blocks_max) + 1, max(6, ceil_log2(inputs.max_num_seqs) + 1))


def limit_of_wide_blocks(inputs: BucketingInputs, blocks_max: int) -> int:
    """Returns the result of `limit_of_blocks`, and more above what sequences are expected to share (from v0.24.0)."""
    limit, shared = ceil_log2(blocks_max) + 1, shared_cache(inputs)
    if not inputs.contiguous_pa and blocks_max > shared:
        limit += ceil_log2(blocks_max / shared) + 1
    return limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentialRules:
    """What changed between versions. The defaults are those of 091bbad.

    `heeds_query_min`: VLLM_PROMPT_QUERY_BUCKET_MIN=1 counts. `shortens_long_contexts`: from a model length of 8192 on, the
    largest prompt context leaves room for a whole step. `decode_max` applies without contiguous paged attention. With it the
    most blocks are the cache's, or fewer if `contiguous_within_sequences` and the sequences have fewer.
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
        """Returns the ranges of the prompt phase. Raises SpecError if upstream's rules give none."""
        return self._ranges(self.prompt_axes(inputs), inputs)

    def decode_ranges(self, inputs: BucketingInputs) -> Ranges:
        """Returns the ranges of the decode phase. Raises SpecError if upstream's rules give none."""
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
        """Returns the decode dimensions (exponential.py 89-137). Raises SpecError if they hold no block."""
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
            return min(inputs.num_blocks, all_sequences(inputs))
        return inputs.num_blocks

    def _ranges(self, axes: ExponentialAxes, inputs: BucketingInputs) -> Ranges:
        found = (
            exponential_range(axis, self.rules.points, contiguous_pa=inputs.contiguous_pa)
            for axis in (axes.batch_size, axes.query_len, axes.context)
        )
        return Ranges(*(tuple(sorted(values)) for values in found))


def _whole_blocks(inputs: BucketingInputs) -> int:
    return inputs.max_model_len // inputs.block_size * inputs.max_num_seqs
