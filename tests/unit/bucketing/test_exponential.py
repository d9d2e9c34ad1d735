from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.exponential import ExponentialAxis, RangeRule, ceil_log2, exponential_range
from aotgaudi.bucketing.extension import EXTENSION_POINTS
from aotgaudi.errors import SpecError

NEWEST = RangeRule()
UNCLIPPED = RangeRule(clips_last=False)


@st.composite
def filled_axes(draw: st.DrawFn) -> ExponentialAxis:
    minimum, step = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    maximum = draw(st.integers(1, 3000))
    return ExponentialAxis(minimum, step, maximum, draw(st.integers(1, 60)))


def filled_by_search(axis: ExponentialAxis) -> list[int]:
    """Searches all free multiples for each point that is taken already."""
    multiples, taken = set(range(axis.minimum, axis.maximum + 1, axis.step)), set[int]()
    if axis.limit == 1:
        return [axis.maximum]
    for index in range(axis.limit):
        exact = axis.minimum * math.pow(axis.maximum / axis.minimum, (1.0 / float(axis.limit - 1)) * index)
        point = math.ceil(exact / axis.step) * axis.step
        if point in taken:
            free = sorted(multiples - taken)
            if not free:
                break
            point = min(free, key=lambda value: abs(value - exact))
        taken.add(point)
    return sorted(taken)


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        # Exact arithmetic has 512 and 1024, and the powers of two.
        (ExponentialAxis(64, 64, 2048, 11), (64, 128, 192, 256, 384, 576, 768, 1088, 1472, 2048)),
        (ExponentialAxis(0, 1, 1024, 11), (0, 1, 2, 4, 9, 17, 32, 65, 129, 257, 513, 1024)),
        (ExponentialAxis(1, 32, 1024, 11), (1, 32, 64, 96, 128, 192, 288, 384, 544, 736, 1024)),
        (ExponentialAxis(1, 2, 3, 3), (1, 2, 3)),
        (ExponentialAxis(1, 2, 7, 1), (7,)),
        # Two points are above the maximum; only the last one is replaced by it.
        (ExponentialAxis(20, 4, 10, 4), (12, 16, 10)),
    ],
)
def test_points_keep_the_order_of_double_precision_operations(
    axis: ExponentialAxis, expected: tuple[int, ...]
) -> None:
    assert exponential_range(axis, NEWEST, contiguous_pa=False) == expected


@pytest.mark.parametrize(
    ("rule", "contiguous_pa", "expected"),
    [
        (NEWEST, False, (1, 96, 100)),
        (NEWEST, True, (1, 96, 100, 100)),
        (UNCLIPPED, False, (1, 96, 192)),
        (UNCLIPPED, True, (1, 96, 100, 192)),
        (RangeRule(special_minima=frozenset({0})), False, (96, 100)),
    ],
)
def test_the_first_and_the_last_point_depend_on_the_version(
    rule: RangeRule, contiguous_pa: bool, expected: tuple[int, ...]
) -> None:
    """All points above 96 are rounded up to 192; with contiguous paged attention the last one is 100."""
    axis = ExponentialAxis(1, 96, 100, 8)

    assert exponential_range(axis, rule, contiguous_pa=contiguous_pa) == expected


def test_a_point_that_is_taken_is_replaced_by_the_nearest_free_multiple_the_smaller_of_two() -> None:
    axis = ExponentialAxis(1, 2, 4, 3)

    assert exponential_range(axis, EXTENSION_POINTS, contiguous_pa=False) == (1, 2, 4)


def test_half_of_the_points_of_a_long_context_are_spaced_linearly() -> None:
    axis = ExponentialAxis(1, 1, 961, 11)
    expected = (1, 4, 10, 29, 88, 233, 379, 525, 670, 816, 961)

    assert exponential_range(axis, EXTENSION_POINTS, contiguous_pa=True, long_context=True) == expected
    assert exponential_range(axis, NEWEST, contiguous_pa=True, long_context=True) == exponential_range(
        axis, NEWEST, contiguous_pa=True
    )


@given(filled_axes())
def test_filling_equals_a_search_of_all_multiples(axis: ExponentialAxis) -> None:
    assert list(exponential_range(axis, EXTENSION_POINTS, contiguous_pa=False)) == filled_by_search(axis)


def test_filling_a_lattice_to_its_end_takes_about_a_step_a_value() -> None:
    axis = ExponentialAxis(1, 1, 200_000, 900_000)

    assert exponential_range(axis, EXTENSION_POINTS, contiguous_pa=False) == tuple(range(1, 200_001))


@pytest.mark.parametrize(
    ("axis", "rule", "long_context", "message"),
    [
        (ExponentialAxis(1, 1, 1, 0), NEWEST, False, "max_num_batched_tokens of at least 2"),
        (ExponentialAxis(0, 1, 8, 4), EXTENSION_POINTS, False, "from 1 in this version"),
        (ExponentialAxis(128, 128, 4, 3), EXTENSION_POINTS, True, r"limits\.max_model_len: is 4, too short"),
        (ExponentialAxis(1, 1, 10**7, 10**7), EXTENSION_POINTS, False, "10,000,000 values"),
    ],
)
def test_a_dimension_without_points_or_with_too_many_is_refused(
    axis: ExponentialAxis, rule: RangeRule, long_context: bool, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        exponential_range(axis, rule, contiguous_pa=False, long_context=long_context)


@pytest.mark.parametrize(("value", "expected"), [(1, 0), (2, 1), (3, 2), (4, 2), (8192, 13), (8193, 14)])
def test_ceil_log2(value: int, expected: int) -> None:
    assert ceil_log2(value) == expected
