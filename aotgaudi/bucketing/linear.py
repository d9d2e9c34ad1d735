"""The linear strategy of vllm-gaudi: vllm_gaudi/extension/bucketing/linear.py, at 091bbad.

Each dimension is ``[min, step, max]``: values double up to `step`, then ascend by it. `combine` makes the products.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from aotgaudi.bucketing.strategy import BucketingInputs, Ranges, check_num_values
from aotgaudi.errors import SpecError
from aotgaudi.spec.bucketing import AxisBounds


@dataclass(frozen=True, slots=True)
class LinearAxis:
    """One dimension: multiples of `step` from `minimum` to `maximum`, and powers of two times `minimum` below."""

    minimum: int
    step: int
    maximum: int

    @classmethod
    def bounded(cls, bounds: AxisBounds, minimum: int, step: int, maximum: int) -> LinearAxis:
        """Returns these defaults with a spec's bounds in their place."""
        return cls(
            minimum if bounds.min is None else bounds.min,
            step if bounds.step is None else bounds.step,
            maximum if bounds.max is None else bounds.max,
        )


@dataclass(frozen=True, slots=True)
class LinearAxes:
    """The three dimensions of one phase."""

    batch_size: LinearAxis
    query_len: LinearAxis
    context: LinearAxis

    def ranges(self, phase: str) -> Ranges:
        """Returns the values of each dimension. Raises SpecError, which names the dimension."""
        names = DIMENSIONS[phase]
        axes = (self.batch_size, self.query_len, self.context)
        return Ranges(
            *(linear_range(axis, f"bucketing.{phase}.{name}") for axis, name in zip(axes, names, strict=True))
        )


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

    `clamps_always`: decode contexts end at the cache's blocks, under contiguous paged attention or not, and only
    a range that is cut there has its minimum corrected (up to v0.19.1).
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
        query_len = LinearAxis.bounded(bounds.query_len, block_size, block_size, max_tokens)
        ctx_max = (inputs.max_model_len - query_len.minimum) // block_size
        if inputs.merged_prefill:
            return LinearAxes(
                ONE,
                LinearAxis(query_len.minimum, 4 * query_len.step, max_tokens),
                LinearAxis.bounded(bounds.num_ctx_blocks, 0, 4, ctx_max * num_seqs),
            )
        return LinearAxes(
            LinearAxis.bounded(bounds.batch_size, 1, 1, num_seqs),
            query_len,
            LinearAxis.bounded(bounds.num_ctx_blocks, 0, 1, ctx_max),
        )

    def decode_axes(self, inputs: BucketingInputs) -> LinearAxes:
        """Returns the decode dimensions (linear.py 56-90)."""
        block_size, num_blocks = inputs.block_size, inputs.num_blocks
        most = max(inputs.max_model_len * inputs.max_num_seqs // block_size, block_size)
        if inputs.contiguous_pa:
            most = num_blocks
        return LinearAxes(
            LinearAxis.bounded(inputs.decode.batch_size, 1, 32, inputs.max_num_seqs),
            ONE,
            self._clamped(LinearAxis.bounded(inputs.decode.num_blocks, 1, block_size, most), inputs),
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

    The maximum is among them only where it is a multiple of the step. Raises SpecError, which names `where`.
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
    """Raises SpecError, which names `where`, for a dimension without values or with too many."""
    if step < 1:
        raise SpecError(f"{where}.step", f"is {step}", "at least 1")
    if not 0 <= minimum <= maximum:
        remedy = "0 <= min <= max; what is not set follows from the limits"
        raise SpecError(where, f"min is {minimum}, max is {maximum}", remedy)
    check_num_values((maximum - minimum) // step, where)
