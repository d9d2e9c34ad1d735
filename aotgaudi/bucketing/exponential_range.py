"""Exponentially spaced points between two numbers, exactly as upstream rounds them, by version.

The points depend on IEEE double arithmetic in exactly this order of operations; exact arithmetic gives other
tables (``[0, 1, 1024, 11]`` has 9, 17, 65, 129, not powers of two). Sources: vllm-gaudi at 091bbad,
vllm_gaudi/extension/bucketing/exponential.py 144-203; vllm-hpu-extension at 8211e0b,
vllm_hpu_extension/bucketing/exponential.py 203-320.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from aotgaudi.bucketing.strategy import check_num_values
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
    """How points are chosen; the defaults are those of vllm-gaudi at 091bbad.

    `special_minima`: minima that are a point of their own, while the spacing starts at the step.
    `clips_last`: a last point above the maximum becomes the maximum. `fills`: a point that is taken already is
    replaced by the free multiple that is nearest to the unrounded point. `knows_long_context`: in a long
    context, half of the points are spaced linearly.
    """

    special_minima: frozenset[int] = frozenset({0, 1})
    clips_last: bool = True
    fills: bool = False
    knows_long_context: bool = False


def exponential_range(
    axis: ExponentialAxis, rule: RangeRule, *, contiguous_pa: bool, long_context: bool = False
) -> tuple[int, ...]:
    """Returns the points of one dimension, ascending, but for a last one that is replaced by `maximum`.

    So the last two may be equal; and the last may be less, where the dimension's `maximum` is below its start.

    Raises:
        SpecError: the axis has no points, or too many; or too few for a linear half, where upstream divides
            by zero.
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
    """Returns exponential points up to ``maximum / limit``, and linear ones from there; none is filled there."""
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

    Each index points to the next candidate below and above; paths are shortened as they are walked, so that
    taking all of n values costs about n steps.
    """

    def __init__(self, start: int, axis: ExponentialAxis) -> None:
        self.taken: set[int] = set()
        self._start, self._step = start, axis.step
        self._num_values = max(0, (axis.maximum - start) // axis.step + 1)
        self._next = {-1: dict[int, int](), 1: dict[int, int]()}

    def take(self, value: int) -> None:
        """Takes a value, which need not be one of the multiples."""
        self.taken.add(value)
        index, rest = divmod(value - self._start, self._step)
        if rest == 0 and 0 <= index < self._num_values:
            for direction, following in self._next.items():
                following[index] = index + direction

    def nearest(self, exact: float) -> int | None:
        """Returns the free value nearest to `exact`, the smaller of two; None when all are taken."""
        at = min(max(math.floor((exact - self._start) / self._step), -1), self._num_values - 1)
        indices = (self._free(at, -1), self._free(at + 1, 1))
        values = [self._start + i * self._step for i in indices if 0 <= i < self._num_values]
        return min(values, key=lambda value: abs(value - exact), default=None)

    def _free(self, index: int, direction: int) -> int:
        """Returns the first index from `index` on that is not taken; it may be outside of the values."""
        following = self._next[direction]
        path = []
        while index in following:
            path.append(index)
            index = following[index]
        following.update(dict.fromkeys(path, index))
        return index
