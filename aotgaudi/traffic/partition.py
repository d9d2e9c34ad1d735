"""Covers points with a given number of boxes at the least cost, by exact dynamic programs over integers.

A point has two coordinates and a count. A box reaches from the origin to a corner and covers the points in it. A point costs
as much as its box, whose cost grows with the corner. A point takes its box as the engine's look-up does
(bucketing/lookup.py): the covering box with the least first coordinate, then the least second.

**One dimension.** Sorted points are cut into runs. The last point of a run is its box. If F is the number of points up to a
point and c the cost of a box, the best cost of m boxes up to point b is::

    best(m, b) = F(b) * c(b) + min over a < b of best(m - 1, a) - F(a) * c(b)

This is the minimum of lines at ever larger x, so each further box takes linear time. The result is the optimum.

**Two dimensions.** The first coordinate is cut into slabs, and the points of a slab into runs by the second coordinate. Both
cuts are optimal, for all numbers of boxes at once. The result is the optimum among tables in which each slab covers its own
points. Other tables, in which a few points of a slab use a later slab, may cost a little less.

An axis with more than some dozens of values is first reduced to that many, optimally in one dimension.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

Point = tuple[int, int]
Box = tuple[int, int]
Cost = Callable[[int, int], int]
"""The cost of a box by its corner. It is positive and grows with both coordinates."""

MOST_FIRST, MOST_SECOND, MOST_IN_SLAB = 64, 64, 24
"""The most values of an axis, and the most boxes of a slab."""


def best_runs(points: Sequence[tuple[int, int]], most: int) -> list[list[int]]:
    """Returns, for each number of boxes from 1 to `most`, the best cost of the first 1, 2, ... points.

    `points` are (count, cost of a box that ends there), ascending by cost, with counts of at least 1.
    """
    return [layer for layer, _ in _layers(points, most)]


def _layers(points: Sequence[tuple[int, int]], most: int) -> list[tuple[list[int], list[int]]]:
    """Returns, for each number of boxes, the best costs and after how many points the last run begins."""
    sums = [0, *accumulate(count for count, _ in points)]
    costs = [cost for _, cost in points]
    layers = [([sums[b + 1] * costs[b] for b in range(len(points))], [0] * len(points))]
    for num in range(2, min(most, len(points)) + 1):
        layers.append(_next_layer(layers[-1][0], sums, costs, num))
    return layers


def _next_layer(
    before: Sequence[int], sums: Sequence[int], costs: Sequence[int], num: int
) -> tuple[list[int], list[int]]:
    """Returns the layer for one more box.

    The lines ``before(a) - F(a) * x`` fall ever more steeply, and x grows, so the lower hull is a queue. With fewer points
    than boxes, a box is left out.
    """
    best, begin = list(before[: num - 1]), list(range(num - 1))
    hull: list[int] = []  # Lines, by the number of points before the last run.
    first = 0
    for b in range(num - 1, len(costs)):
        _push(hull, first, b, before, sums)
        x = costs[b]
        while first + 1 < len(hull) and _at(hull[first + 1], x, before, sums) <= _at(
            hull[first], x, before, sums
        ):
            first += 1
        best.append(sums[b + 1] * x + _at(hull[first], x, before, sums))
        begin.append(hull[first])
    return best, begin


def _at(a: int, x: int, before: Sequence[int], sums: Sequence[int]) -> int:
    return before[a - 1] - sums[a] * x


def _push(hull: list[int], first: int, new: int, before: Sequence[int], sums: Sequence[int]) -> None:
    """Adds the line of `new`, and drops lines that are now nowhere the lowest."""
    while len(hull) - first >= 2:
        left, middle = hull[-2], hull[-1]
        above = (before[new - 1] - before[left - 1]) * (sums[middle] - sums[left])
        below = (before[middle - 1] - before[left - 1]) * (sums[new] - sums[left])
        if above > below:
            break
        hull.pop()
    hull.append(new)


def runs(points: Sequence[tuple[int, int]], num: int) -> list[int]:
    """Returns the indices of the points at which the best `num` boxes end, ascending. The last one is the last point's."""
    layers = _layers(points, num)
    ends, end = [], len(points)
    for _, begin in reversed(layers):
        if end == 0:
            break
        ends.append(end - 1)
        end = begin[end - 1]
    return ends[::-1]


def axis_values(counts: Mapping[Point, int], cost: Cost, axis: int, most: int) -> list[int]:
    """Returns the best cut of one axis: at most `most` of its values, ascending, including the largest."""
    values = _marginal(counts, axis)
    if len(values) <= most:
        return [value for value, _ in values]
    middle = _middle(counts, 1 - axis)
    weighed = [(count, cost(value, middle) if axis == 0 else cost(middle, value)) for value, count in values]
    return [values[end][0] for end in runs(weighed, most)]


def _marginal(counts: Mapping[Point, int], axis: int) -> list[tuple[int, int]]:
    """Returns the values of an axis, ascending, and how often each occurs."""
    totals: Counter[int] = Counter()
    for point, count in counts.items():
        totals[point[axis]] += count
    return sorted(totals.items())


def _middle(counts: Mapping[Point, int], axis: int) -> int:
    total = sum(counts.values())
    return sum(point[axis] * count for point, count in counts.items()) // total


class BestTables:
    """The best tables of 1, 2, ... boxes. `costs` has the cost of each. More boxes do not help."""

    def __init__(self, counts: Mapping[Point, int], cost: Cost, most: int) -> None:
        """Finds the tables of 1 to `most` boxes for points with these counts (at least 1, in any order)."""
        self._firsts = axis_values(counts, cost, 0, MOST_FIRST)
        self._seconds = axis_values(counts, cost, 1, MOST_SECOND)
        self._counts = [[0] * len(self._seconds) for _ in self._firsts]
        for (first, second), count in counts.items():
            self._counts[bisect_left(self._firsts, first)][bisect_left(self._seconds, second)] += count
        self._cost, self._most = cost, most
        best: list[dict[int, int]] = [{0: 0}]  # After i values of the first axis: boxes -> cost.
        # Boxes -> begin and number of boxes of the last slab.
        self._cuts: list[dict[int, tuple[int, int]]] = [{}]
        for end in range(1, len(self._firsts) + 1):
            found, cuts = self._best_until(end, best)
            best.append(found)
            self._cuts.append(cuts)
        self._last = best[-1]
        costs = (self._last.get(num, self._last[1]) for num in range(1, max(self._last) + 1))
        self.costs = tuple(accumulate(costs, min))

    def cost(self, num: int) -> int:
        """Returns the cost of the best table of at most `num` boxes (at least 1)."""
        return self.costs[min(num, len(self.costs)) - 1]

    def boxes(self, num: int) -> tuple[Box, ...]:
        """Returns a table of that cost, ascending. It may have fewer boxes."""
        costs = self._last
        num = min((each for each in costs if each <= num), key=lambda each: (costs[each], each))
        boxes, end = [], len(self._firsts)
        while end:
            begin, size = self._cuts[end][num]
            column = [sum(row) for row in zip(*self._counts[begin:end], strict=True)]
            seconds = [second for second, count in zip(self._seconds, column, strict=True) if count]
            ends = runs(self._points(end, column), size)
            boxes += [(self._firsts[end - 1], seconds[at]) for at in ends]
            num, end = num - size, begin
        return tuple(sorted(boxes))

    def _best_until(
        self, end: int, best: Sequence[Mapping[int, int]]
    ) -> tuple[dict[int, int], dict[int, tuple[int, int]]]:
        """Returns the costs and last slabs for the first `end` values of the first axis, given those for fewer."""
        found: dict[int, int] = {}
        cuts: dict[int, tuple[int, int]] = {}
        column = [0] * len(self._seconds)
        for begin in range(end - 1, -1, -1):
            column = [a + b for a, b in zip(column, self._counts[begin], strict=True)]
            slab = best_runs(self._points(end, column), min(MOST_IN_SLAB, self._most))
            for size, own in enumerate((layer[-1] for layer in slab), start=1):
                for num, cost in best[begin].items():
                    total, boxes = cost + own, num + size
                    if boxes <= self._most and (boxes not in found or total < found[boxes]):
                        found[boxes], cuts[boxes] = total, (begin, size)
        return found, cuts

    def _points(self, end: int, column: Sequence[int]) -> list[tuple[int, int]]:
        first = self._firsts[end - 1]
        return [
            (count, self._cost(first, second))
            for second, count in zip(self._seconds, column, strict=True)
            if count
        ]
