"""How little any table of so many boxes could cost: a bound from below, for what ``traffic.partition`` finds.

Choosing boxes is a facility location problem: a box is opened at a price, and every point pays the least cost among the
boxes that cover it (the engine's look-up may take a dearer one). By Lagrange's and linear duality, for any price and any
v of which no box is offered more than the price::

    v(p) for every point p, with  sum over p of max(0, v(p) - cost(box, p)) <= price  for every box
    then every table of n boxes costs  sum of v(p) - price * n  at least

The v are raised in turn as far as they may (Erlenkotter, A Dual-Based Procedure for Uncapacitated Facility Location,
Operations Research 26, 1978). To keep it small, both axes are cut into some dozens of intervals. A box then counts as one
with the least corner of its cell, and covers all points of its cell: cheaper and wider than it is, so the bound holds
for all boxes, not for those of a grid. All numbers are integers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aotgaudi.traffic.partition import Cost, Point, axis_values

_CELLS = 24
"""Intervals of an axis."""

_MOST_ROUNDS = 40


GAP_COVERS = (
    "any table of as many prompt and decode entries, on the steps of the replay, sizes rounded up to those below, with a"
    " hundredth of their work spread over all steps that can be formed"
)
"""What the bound that ``aotgaudi tune`` prints covers."""

GAP_LEAVES_OUT = (
    "what queries between multiples of --query-step, batch sizes other than 16 chosen ones, and blocks between a size and a"
    " quarter more could save",
    "tables in which the scheduler would form other steps",
    "other traffic, and steps that take other times than this work says",
)
"""What it says nothing of."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """The points of a cell: what they cost in boxes of their own, and in each that covers them: (cost, box), ascending."""

    own: int
    offers: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Relaxation:
    """Points and boxes in cells."""

    cells: tuple[_Cell, ...]
    num_boxes: int

    @classmethod
    def of(cls, counts: Mapping[Point, int], cost: Cost) -> Relaxation:
        """Returns the relaxation of a problem of `traffic.partition`."""
        firsts, seconds = axis_values(counts, cost, 0, _CELLS), axis_values(counts, cost, 1, _CELLS)
        amounts: Counter[Point] = Counter()
        own: Counter[Point] = Counter()
        for (first, second), count in counts.items():
            place = bisect_left(firsts, first), bisect_left(seconds, second)
            amounts[place] += count
            own[place] += count * cost(first, second)
        least = min(first for first, _ in counts), min(second for _, second in counts)
        lows = _lows(firsts, least[0]), _lows(seconds, least[1])
        return cls(
            tuple(_cell(place, amounts[place], own[place], lows, cost) for place in sorted(amounts)),
            len(firsts) * len(seconds),
        )

    def raised(self, price: int) -> int:
        """Returns a sum of v for this price of a box."""
        values = [cell.own for cell in self.cells]
        slack = [price] * self.num_boxes
        nexts = [0] * len(self.cells)  # How many of a cell's offers are at most its v.
        for index, cell in enumerate(self.cells):
            nexts[index] = _num_at_most(cell, values[index])
        for _ in range(_MOST_ROUNDS):
            changed = [self._raise(index, values, nexts, slack) for index in range(len(values))]
            if not any(changed):
                break
        return sum(values)

    def _raise(self, index: int, values: list[int], nexts: list[int], slack: list[int]) -> bool:
        """Raises a cell's v to its next offer, or as far as the boxes that it has reached allow."""
        cell, reached = self.cells[index], nexts[index]
        boxes = [box for _, box in cell.offers[:reached]]
        room = min(slack[box] for box in boxes)
        step = min(room, cell.offers[reached][0] - values[index]) if reached < len(cell.offers) else room
        if step <= 0:
            return False
        for box in boxes:
            slack[box] -= step
        values[index] += step
        nexts[index] = _num_at_most(cell, values[index])
        return True


def _cell(place: Point, count: int, own: int, lows: tuple[Sequence[int], Sequence[int]], cost: Cost) -> _Cell:
    width = len(lows[1])
    offers = [
        (max(own, count * cost(lows[0][i], lows[1][j])), i * width + j)
        for i in range(place[0], len(lows[0]))
        for j in range(place[1], width)
    ]
    return _Cell(own, tuple(sorted(offers)))


def _lows(uppers: Sequence[int], least: int) -> list[int]:
    """The least value of each interval."""
    return [least, *(upper + 1 for upper in uppers[:-1])]


def _num_at_most(cell: _Cell, value: int) -> int:
    return bisect_left(cell.offers, (value + 1, -1))


def least_cost(relaxations: Sequence[Relaxation], num_boxes: int, prices: Sequence[int]) -> int:
    """Returns what tables of `num_boxes` in all cost at least, for problems that share them: the best of some prices."""
    own = sum(cell.own for relaxation in relaxations for cell in relaxation.cells)
    bounds = (sum(each.raised(price) for each in relaxations) - price * num_boxes for price in prices)
    return max(own, *bounds)
