"""Finding, among boxes that are anchored at the origin, the best one that contains a point.

An entry covers a step when it is at least as large in every dimension. The sizes that occur in each
dimension cut space into cells; within a cell the answer is the same, so it is computed once for every cell
and a look-up is one bisection a dimension.
"""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")

Size = tuple[int, ...]


class CoverIndex(Generic[T]):
    """Immutable. `find` takes about a microsecond; memory is one reference a cell."""

    def __init__(
        self, items: Iterable[T], size: Callable[[T], Size], rank: Callable[[T], tuple[int, ...]]
    ) -> None:
        """Indexes `items`: `size` gives an item's box, `rank` orders them, least first; ties keep order."""
        ordered = sorted(items, key=rank)
        sizes = [size(item) for item in ordered]
        self._axes = [sorted(set(values)) for values in zip(*sizes, strict=True)]
        lengths = [len(axis) for axis in self._axes]
        self._strides = [math.prod(lengths[index + 1 :]) for index in range(len(lengths))]
        best = _propagated(lengths, self._strides, self._exact(sizes))
        self._cells = [None if index is None else ordered[index] for index in best]

    def find(self, point: Size) -> T | None:
        """Returns the item of least rank whose box contains `point`; None when there is none."""
        if not self._cells:
            return None
        cell = 0
        for axis, stride, value in zip(self._axes, self._strides, point, strict=True):
            index = bisect_left(axis, value)
            if index == len(axis):
                return None
            cell += index * stride
        return self._cells[cell]

    def _exact(self, sizes: list[Size]) -> list[int | None]:
        """Returns for every cell the first item whose box ends exactly there."""
        best: list[int | None] = [None] * (math.prod(map(len, self._axes)) if sizes else 0)
        places = [{value: index for index, value in enumerate(axis)} for axis in self._axes]
        for item in reversed(range(len(sizes))):
            indices = (place[value] for place, value in zip(places, sizes[item], strict=True))
            best[sum(map(operator.mul, indices, self._strides))] = item
        return best


def _propagated(lengths: list[int], strides: list[int], best: list[int | None]) -> list[int | None]:
    """Spreads every item to the cells that its box contains, downwards along each dimension in turn."""
    for length, stride in zip(lengths, strides, strict=True):
        outer = range(0, len(best), length * stride)
        for start, index, inner in itertools.product(outer, range(length - 2, -1, -1), range(stride)):
            cell = start + index * stride + inner
            best[cell] = _lesser(best[cell], best[cell + stride])
    return best


def _lesser(first: int | None, second: int | None) -> int | None:
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)
