from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.exponential import ExponentialAxis, RangeRule, exponential_range
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
