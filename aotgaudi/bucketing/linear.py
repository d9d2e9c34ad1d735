"""The linear and the padding-aware strategy of vllm-gaudi, at 091bbad. ``bucketing.combine`` makes the products.

**Linear** (vllm_gaudi/extension/bucketing/linear.py). Each dimension is ``[min, step, max]``: values double up to
`step`, then ascend by it.

**Padding-aware**, from v0.21.0 (vllm_gaudi/extension/bucketing/padding_aware.py). Each dimension is ``[min, step, max,
pad_max, pad_percent]``. A linear value is kept only if a step would otherwise be padded by more than `pad_max`, or by more
than `pad_percent` of the padded size.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TypeVar

from aotgaudi.bucketing.strategy import BucketingInputs, Ranges, check_num_values
from aotgaudi.errors import SpecError
from aotgaudi.spec.bucketing import AxisBounds

_Axis = TypeVar("_Axis", bound="LinearAxis")


@dataclass(frozen=True, slots=True)
class LinearAxis:
    """One dimension: multiples of `step` from `minimum` to `maximum`, and powers of two times `minimum` below."""

    minimum: int
    step: int
    maximum: int

    def bounded(self: _Axis, bounds: AxisBounds) -> _Axis:
        """Returns this axis with the bounds that a spec sets."""
        given = {**vars(bounds), "minimum": bounds.min, "maximum": bounds.max}
        return replace(self, **{name: given[name] for name in self.__match_args__ if given[name] is not None})

    def values(self, where: str) -> tuple[int, ...]:
        """Returns the values, ascending. Raises SpecError, naming `where`."""
        return linear_range(self, where)


@dataclass(frozen=True, slots=True)
class PaddedAxis(LinearAxis):
    """One dimension: values from `minimum` to `maximum`, multiples of `step` above it. `pad_max` 0 means no bound."""

    pad_max: int
    pad_percent: int

    def values(self, where: str) -> tuple[int, ...]:
        """Returns the values, ascending. Raises SpecError, naming `where`."""
        return padded_range(self, where)


@dataclass(frozen=True, slots=True)
class LinearAxes:
    """The three dimensions of one phase."""

    batch_size: LinearAxis
    query_len: LinearAxis
    context: LinearAxis

    def ranges(self, phase: str) -> Ranges:
        """Returns the values of each dimension. Raises SpecError, naming the dimension."""
        axes = (self.batch_size, self.query_len, self.context)
        named = zip(axes, DIMENSIONS[phase], strict=True)
        return Ranges(*(axis.values(f"bucketing.{phase}.{name}") for axis, name in named))


DIMENSIONS = {
    "prompt": ("batch_size", "query_len", "num_ctx_blocks"),
    "decode": ("batch_size", "query_len", "num_blocks"),
}
"""The names of the dimensions of each phase in a spec."""

ONE = LinearAxis(1, 1, 1)
"""A dimension that is not bucketed."""


@dataclass(frozen=True, slots=True)
class LinearRanges:
    """Ranges of vllm-gaudi. See ``combine.RangeSource``.

    `clamps_always`: decode contexts end at the cache's blocks, with or without contiguous paged attention, and only a range
    that is cut there has its minimum corrected (up to v0.19.1).
    """

    clamps_always: bool = False

    def prompt_ranges(self, inputs: BucketingInputs) -> Ranges:
        """Returns the ranges of the prompt phase. Raises SpecError for a dimension without values."""
        return self.prompt_axes(inputs).ranges("prompt")

    def decode_ranges(self, inputs: BucketingInputs) -> Ranges:
        """Returns the ranges of the decode phase. Raises SpecError for a dimension without values."""
        return self.decode_axes(inputs).ranges("decode")

    def prompt_axes(self, inputs: BucketingInputs) -> LinearAxes:
        """Returns the prompt dimensions (linear.py 14-54)."""
        block_size, max_tokens = inputs.block_size, inputs.max_num_batched_tokens
        num_seqs, bounds = inputs.max_num_prefill_seqs, inputs.prompt
        query_len = LinearAxis(block_size, block_size, max_tokens).bounded(bounds.query_len)
        ctx_max = (inputs.max_model_len - query_len.minimum) // block_size
        if inputs.merged_prefill:
            return LinearAxes(
                ONE,
                LinearAxis(query_len.minimum, 4 * query_len.step, max_tokens),
                LinearAxis(0, 4, ctx_max * num_seqs).bounded(bounds.num_ctx_blocks),
            )
        return LinearAxes(
            LinearAxis(1, 1, num_seqs).bounded(bounds.batch_size),
            query_len,
            LinearAxis(0, 1, ctx_max).bounded(bounds.num_ctx_blocks),
        )

    def decode_axes(self, inputs: BucketingInputs) -> LinearAxes:
        """Returns the decode dimensions (linear.py 56-90)."""
        block_size, num_blocks = inputs.block_size, inputs.num_blocks
        most = max(inputs.max_model_len * inputs.max_num_seqs // block_size, block_size)
        if inputs.contiguous_pa:
            most = num_blocks
        return LinearAxes(
            LinearAxis(1, 32, inputs.max_num_seqs).bounded(inputs.decode.batch_size),
            ONE,
            self._clamped(LinearAxis(1, block_size, most).bounded(inputs.decode.num_blocks), inputs),
        )

    def _clamped(self, axis: LinearAxis, inputs: BucketingInputs) -> LinearAxis:
        is_cut = axis.maximum > inputs.num_blocks and (self.clamps_always or inputs.contiguous_pa)
        if is_cut:
            axis = replace(axis, maximum=inputs.num_blocks)
        if axis.minimum > axis.maximum and (is_cut or not self.clamps_always):
            axis = replace(axis, minimum=max(1, axis.maximum - axis.step))
        return axis


def linear_range(axis: LinearAxis, where: str = "bucketing") -> tuple[int, ...]:
    """Returns the values of one dimension, ascending (linear.py 129-160).

    They include the maximum only if it is a multiple of the step. Raises SpecError, naming `where`.
    """
    check_axis(axis.minimum, axis.step, axis.maximum, where)
    if axis.maximum == 0:
        return (0,)
    start = axis.minimum or axis.step
    ramp = itertools.takewhile(
        lambda value: value < axis.step and value <= axis.maximum,
        (start << power for power in itertools.count()),
    )
    first = -(-max(start, axis.step) // axis.step) * axis.step
    zero = (0,) if axis.minimum == 0 else ()
    return (*zero, *ramp, *range(first, axis.maximum + 1, axis.step))


def check_axis(minimum: int, step: int, maximum: int, where: str) -> None:
    """Raises SpecError, naming `where`, for a dimension without values or with too many."""
    if step < 1:
        raise SpecError(f"{where}.step", f"is {step}", "at least 1")
    if not 0 <= minimum <= maximum:
        remedy = "0 <= min <= max; what is not set follows from the limits"
        raise SpecError(where, f"min is {minimum}, max is {maximum}", remedy)
    check_num_values((maximum - minimum) // step, where)


_MAX_PAD_PERCENT = 50
_PAD_PERCENT = 25
_PAD_PARTS = 4
"""The default: a step is padded by at most a quarter of the dimension's maximum."""


class PaddingAwareRanges:
    """Ranges of both phases; stateless. See ``combine.RangeSource``."""

    def prompt_ranges(self, inputs: BucketingInputs) -> Ranges:
        """Returns the ranges of the prompt phase. Raises SpecError for a dimension without values."""
        return padded_prompt_axes(inputs).ranges("prompt")

    def decode_ranges(self, inputs: BucketingInputs) -> Ranges:
        """Returns the ranges of the decode phase. Raises SpecError for a dimension without values."""
        return padded_decode_axes(inputs).ranges("decode")


def padded_prompt_axes(inputs: BucketingInputs) -> LinearAxes:
    """Returns the prompt dimensions (padding_aware.py 12-65)."""
    block_size, max_tokens = inputs.block_size, inputs.max_num_batched_tokens
    num_seqs, bounds = inputs.max_num_prefill_seqs, inputs.prompt
    batch_size = _padded_axis(1, 1, num_seqs).bounded(bounds.batch_size)
    query_len = _padded_axis(block_size, block_size, max_tokens).bounded(bounds.query_len)
    ctx_max = -((query_len.minimum - inputs.max_model_len) // block_size)
    ctx_pad_max = -(-max_tokens // block_size)
    context = PaddedAxis(0, 2, ctx_max, ctx_pad_max, _PAD_PERCENT)
    if inputs.merged_prefill:
        batch_size = replace(batch_size, minimum=1, step=1, maximum=1)
        query_len = replace(query_len, step=4 * query_len.step, maximum=max_tokens)
        context = PaddedAxis(0, 4, ctx_max * num_seqs, ctx_pad_max, _PAD_PERCENT)
    return LinearAxes(batch_size, query_len, context.bounded(bounds.num_ctx_blocks))


def padded_decode_axes(inputs: BucketingInputs) -> LinearAxes:
    """Returns the decode dimensions (padding_aware.py 67-112)."""
    block_size, num_blocks = inputs.block_size, inputs.num_blocks
    most = max(-(-inputs.max_model_len * inputs.max_num_seqs // block_size), block_size)
    if inputs.contiguous_pa:
        most = num_blocks
    context = _padded_axis(block_size, block_size, most).bounded(inputs.decode.num_blocks)
    if inputs.contiguous_pa and context.maximum > num_blocks:
        context = replace(context, maximum=num_blocks)
    if context.minimum > num_blocks:
        context = replace(context, minimum=max(1, num_blocks - context.step))
    return LinearAxes(
        _padded_axis(1, 2, inputs.max_num_seqs).bounded(inputs.decode.batch_size),
        PaddedAxis(1, 1, 1, 1, 0),
        context,
    )


def padded_range(axis: PaddedAxis, where: str = "bucketing") -> tuple[int, ...]:
    """Returns the values of one dimension, ascending (padding_aware.py 152-212).

    They always include the maximum. Raises SpecError, naming `where`.
    """
    check_axis(axis.minimum, axis.step, axis.maximum, where)
    if not 0 <= axis.pad_percent <= _MAX_PAD_PERCENT:
        raise SpecError(f"{where}.pad_percent", f"is {axis.pad_percent}", f"from 0 to {_MAX_PAD_PERCENT}")
    values = [axis.minimum]
    current = axis.minimum
    while current <= axis.maximum:
        if current <= axis.step:
            current = max(1, 2 * values[-1])
            if current <= axis.maximum:
                values.append(current)
        else:
            if current != values[-1] and _is_kept(current, values[-1], axis):
                values.append(current)
            current += axis.step
    return tuple(values) if values[-1] == axis.maximum else (*values, axis.maximum)


def _is_kept(current: int, last: int, axis: PaddedAxis) -> bool:
    """Whether omitting `current` would pad too much between the `last` value and the next on the lattice."""
    following = current + axis.step
    padding = following - last - 1
    pad_max = axis.pad_max or axis.maximum
    return padding / following > axis.pad_percent / 100.0 or padding > pad_max or current % pad_max == 0


def _padded_axis(minimum: int, step: int, maximum: int) -> PaddedAxis:
    return PaddedAxis(minimum, step, maximum, -(-maximum // _PAD_PARTS), _PAD_PERCENT)
