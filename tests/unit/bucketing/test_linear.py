"""Linear and padding-aware ranges: what they hold, how much they pad, and what is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.linear import (
    LinearAxis,
    LinearRanges,
    PaddedAxis,
    linear_range,
    padded_range,
)
from aotgaudi.bucketing.strategy import BucketingInputs
from aotgaudi.errors import SpecError
from aotgaudi.spec.bucketing import AxisBounds, DecodeBounds, PromptBounds

INPUTS = {
    "max_num_seqs": 64,
    "max_num_prefill_seqs": 2,
    "block_size": 128,
    "max_num_batched_tokens": 2048,
    "max_model_len": 4096,
    "num_blocks": 500,
}


@given(st.integers(0, 500), st.integers(1, 500), st.integers(0, 5000))
def test_a_range_ascends_within_its_bounds(minimum: int, step: int, extent: int) -> None:
    axis = LinearAxis(minimum, step, minimum + extent)

    values = linear_range(axis)

    assert list(values) == sorted(set(values))
    assert all(minimum <= value <= axis.maximum for value in values)
    assert all(value % step == 0 or value < step for value in values)
    assert (0 in values) == (minimum == 0)


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        (LinearAxis(8, 1, 4), r"here: min is 8, max is 4 \(0 <= min <= max"),
        (LinearAxis(0, 1, -1), "here: min is 0, max is -1"),
        (LinearAxis(-1, 1, 4), "here: min is -1"),
        (LinearAxis(1, 0, 4), r"here\.step: is 0 \(at least 1\)"),
        (LinearAxis(1, -2, 4), r"here\.step: is -2"),
        (LinearAxis(1, 1, 2**31 - 1), "here: gives 2,147,483,646 values, more than 1,000,000"),
    ],
)
def test_a_range_without_values_or_with_too_many_is_refused(axis: LinearAxis, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        linear_range(axis, "here")


def test_a_range_that_a_person_turns_round_is_named() -> None:
    inputs = BucketingInputs(**INPUTS, prompt=PromptBounds(batch_size=AxisBounds(min=4)))

    with pytest.raises(SpecError, match=r"bucketing\.prompt\.batch_size: min is 4, max is 2"):
        LinearRanges().prompt_ranges(inputs)


def test_a_least_context_over_a_persons_most_is_lowered_only_by_newer_versions() -> None:
    bounds = DecodeBounds(num_blocks=AxisBounds(min=64, step=16, max=32))
    inputs = BucketingInputs(**INPUTS, decode=bounds)

    assert LinearRanges().decode_axes(inputs).context == LinearAxis(16, 16, 32)
    with pytest.raises(SpecError, match=r"bucketing\.decode\.num_blocks: min is 64, max is 32"):
        LinearRanges(clamps_always=True).decode_ranges(inputs)


axes = st.builds(
    lambda minimum, step, extent, pad_max, percent: PaddedAxis(
        minimum, step, minimum + extent, pad_max, percent
    ),
    st.integers(0, 200),
    st.integers(1, 200),
    st.integers(0, 5000),
    st.integers(0, 500),
    st.integers(0, 50),
)


@given(axes)
def test_a_range_ascends_from_its_minimum_to_its_maximum(axis: PaddedAxis) -> None:
    values = padded_range(axis)

    assert list(values) == sorted(set(values))
    assert (values[0], values[-1]) == (axis.minimum, axis.maximum)


@given(axes)
def test_a_step_above_the_ramp_is_padded_no_more_than_allowed(axis: PaddedAxis) -> None:
    stable = [value for value in padded_range(axis) if value > axis.step]

    for last, value in itertools.pairwise(stable[:-1]):
        padding = value - last - 1
        is_allowed = padding <= (axis.pad_max or axis.maximum) and padding / value <= axis.pad_percent / 100
        assert is_allowed or value - last == axis.step


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        (PaddedAxis(8, 1, 4, 1, 25), "here: min is 8, max is 4"),
        (PaddedAxis(1, 0, 4, 1, 25), r"here\.step: is 0"),
        (PaddedAxis(1, 1, 4, 1, 51), r"here\.pad_percent: is 51 \(from 0 to 50\)"),
        (PaddedAxis(1, 1, 4, 1, -1), r"here\.pad_percent: is -1"),
        (PaddedAxis(0, 1, 2**31 - 1, 0, 50), "here: gives .* values, more than"),
    ],
)
def test_an_axis_that_has_no_range_is_refused(axis: PaddedAxis, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        padded_range(axis, "here")
