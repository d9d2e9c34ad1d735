from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.entries import PromptEntry
from aotgaudi.traffic.partition import BestTables, Box, Point, axis_values, best_runs, runs

counts = st.integers(1, 50)
points = st.dictionaries(st.tuples(st.integers(1, 6), st.integers(0, 5)), counts, min_size=1, max_size=9)
terms = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 3))


def cost_of(terms: tuple[int, int, int]):  # type: ignore[no-untyped-def]
    return lambda first, second: (
        1 + terms[0] * first + terms[1] * second + terms[2] * first * (first + second)
    )


def cost_in(boxes: Iterable[Box], points: Mapping[Point, int], cost) -> int | None:  # type: ignore[no-untyped-def]
    """By the definition: each point takes the covering box of least first coordinate, then of least second one."""
    total = 0
    for point, count in points.items():
        covering = [box for box in boxes if box[0] >= point[0] and box[1] >= point[1]]
        if not covering:
            return None
        total += count * cost(*min(covering))
    return total


def tables(points: Mapping[Point, int], most: int) -> Iterable[tuple[Box, ...]]:
    """Every table of at most so many boxes that could be best: with corners where points are."""
    corners = [(x, y) for x in {x for x, _ in points} for y in {y for _, y in points}]
    for size in range(1, most + 1):
        yield from combinations(sorted(corners), size)


def slabs(boxes: Iterable[Box], points: Mapping[Point, int]) -> bool:
    """Whether no point passes to a later slab than the first that reaches it."""
    firsts = sorted({first for first, _ in boxes})
    return all(
        any(box[1] >= point[1] for box in boxes if box[0] == next(x for x in firsts if x >= point[0]))
        for point in points
        if point[0] <= firsts[-1]
    )


@settings(max_examples=300)
@given(st.lists(st.tuples(counts, st.integers(1, 60)), min_size=1, max_size=9), st.integers(1, 9))
def test_in_one_dimension_no_choice_of_boxes_is_better(cells: list[tuple[int, int]], num: int) -> None:
    cells.sort(key=lambda cell: cell[1])
    last = len(cells) - 1

    best = best_runs(cells, num)[-1][-1]

    def cost(ends: Iterable[int]) -> int:
        return sum(
            count * cells[min(end for end in ends if end >= index)][1]
            for index, (count, _) in enumerate(cells)
        )

    assert best == min(cost((*ends, last)) for ends in combinations(range(last), min(num, len(cells)) - 1))
    assert cost(runs(cells, num)) == best
    assert len(runs(cells, num)) <= num


@settings(max_examples=300)
@given(points, terms, st.integers(1, 4))
def test_in_two_dimensions_no_table_of_slabs_is_better(
    points: dict[Point, int], terms: tuple[int, int, int], num: int
) -> None:
    cost = cost_of(terms)

    curve = BestTables(points, cost, num)

    found = {boxes: cost_in(boxes, points, cost) for boxes in tables(points, num)}
    best = min(each for boxes, each in found.items() if each is not None and slabs(boxes, points))
    assert curve.cost(num) == best
    assert len(curve.boxes(num)) <= num
    assert cost_in(curve.boxes(num), points, cost) == best


@settings(max_examples=300)
@given(
    st.dictionaries(st.tuples(st.integers(1, 40), st.just(3)), counts, min_size=1, max_size=8),
    st.integers(1, 8),
)
def test_where_one_axis_has_one_value_the_optimum_is_found(points: dict[Point, int], num: int) -> None:
    cost = cost_of((3, 1, 1))

    best = min(filter(None, (cost_in(boxes, points, cost) for boxes in tables(points, num))))

    assert BestTables(points, cost, num).cost(num) == best


@given(points, terms)
def test_more_boxes_never_cost_more_and_enough_of_them_pad_nothing(
    points: dict[Point, int], terms: tuple[int, int, int]
) -> None:
    cost = cost_of(terms)

    costs = BestTables(points, cost, 40).costs

    assert list(costs) == sorted(costs, reverse=True)
    assert costs[-1] == sum(count * cost(*point) for point, count in points.items())


@given(points, terms, st.integers(1, 5), st.randoms(use_true_random=False))
def test_the_order_of_the_points_changes_nothing(points, terms, num, random) -> None:  # type: ignore[no-untyped-def]
    shuffled = list(points.items())
    random.shuffle(shuffled)

    assert BestTables(dict(shuffled), cost_of(terms), num).boxes(num) == BestTables(
        points, cost_of(terms), num
    ).boxes(num)


def test_an_axis_of_many_values_is_cut_to_some_and_keeps_the_largest() -> None:
    points = {(first, 1): 1 for first in range(1, 1001)}

    values = axis_values(points, lambda first, second: first + second, 0, 10)

    assert len(values) == 10
    assert values == sorted(values)
    assert values[-1] == 1000


def test_a_table_of_many_points_covers_all_of_them() -> None:
    points = {(first, first * 7 % 300): first % 5 + 1 for first in range(1, 900)}

    boxes = BestTables(points, lambda first, second: 10 * first + second, 30).boxes(30)

    assert len(boxes) <= 30
    table = BucketTable(tuple(PromptEntry(1, *box) for box in boxes), ())
    assert all(table.find_prompt(1, *point) is not None for point in points)
