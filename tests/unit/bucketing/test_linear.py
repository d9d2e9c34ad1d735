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
    padded_decode_axes,
    padded_prompt_axes,
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


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        (LinearAxis(2, 32, 64), (2, 4, 8, 16, 32, 64)),
        (LinearAxis(128, 128, 512), (128, 256, 384, 512)),
        (LinearAxis(0, 4, 31), (0, 4, 8, 12, 16, 20, 24, 28)),
        (LinearAxis(0, 7, 0), (0,)),
        (LinearAxis(1, 1, 1), (1,)),
        (LinearAxis(100, 32, 128), (128,)),
        (LinearAxis(1, 1024, 16), (1, 2, 4, 8, 16)),
    ],
)
def test_a_range_doubles_up_to_its_step_and_then_ascends_by_it(
    axis: LinearAxis, expected: tuple[int, ...]
) -> None:
    assert linear_range(axis) == expected


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


def test_a_persons_bounds_take_the_place_of_the_defaults() -> None:
    inputs = BucketingInputs(
        **INPUTS,
        prompt=PromptBounds(
            query_len=AxisBounds(min=256, step=512, max=1024), num_ctx_blocks=AxisBounds(step=8)
        ),
    )

    axes = LinearRanges().prompt_axes(inputs)

    assert axes.query_len == LinearAxis(256, 512, 1024)
    # 4096 - 256 tokens leave 30 blocks for the shortest query.
    assert axes.context == LinearAxis(0, 8, 30)
    assert axes.batch_size == LinearAxis(1, 1, 2)


def test_a_range_that_a_person_turns_round_is_named() -> None:
    inputs = BucketingInputs(**INPUTS, prompt=PromptBounds(batch_size=AxisBounds(min=4)))

    with pytest.raises(SpecError, match=r"bucketing\.prompt\.batch_size: min is 4, max is 2"):
        LinearRanges().prompt_ranges(inputs)


def test_merged_prefill_has_one_row_and_long_steps() -> None:
    axes = LinearRanges().prompt_axes(BucketingInputs(**INPUTS, merged_prefill=True))

    assert axes.batch_size == LinearAxis(1, 1, 1)
    assert axes.query_len == LinearAxis(128, 512, 2048)
    assert axes.context == LinearAxis(0, 4, 62)


@pytest.mark.parametrize(
    ("clamps_always", "contiguous_pa", "most"),
    [(False, False, 2048), (False, True, 500), (True, False, 500), (True, True, 500)],
)
def test_decode_contexts_end_at_the_cache_by_version(
    clamps_always: bool, contiguous_pa: bool, most: int
) -> None:
    inputs = BucketingInputs(**INPUTS, contiguous_pa=contiguous_pa)

    assert LinearRanges(clamps_always).decode_axes(inputs).context == LinearAxis(1, 128, most)


def test_a_least_context_past_the_cache_is_lowered_by_a_step() -> None:
    bounds = DecodeBounds(num_blocks=AxisBounds(min=1024))
    inputs = BucketingInputs(**INPUTS, contiguous_pa=True, decode=bounds)

    assert LinearRanges().decode_axes(inputs).context == LinearAxis(372, 128, 500)


def test_a_least_context_over_a_persons_most_is_lowered_only_by_newer_versions() -> None:
    bounds = DecodeBounds(num_blocks=AxisBounds(min=64, step=16, max=32))
    inputs = BucketingInputs(**INPUTS, decode=bounds)

    assert LinearRanges().decode_axes(inputs).context == LinearAxis(16, 16, 32)
    with pytest.raises(SpecError, match=r"bucketing\.decode\.num_blocks: min is 64, max is 32"):
        LinearRanges(clamps_always=True).decode_ranges(inputs)


PADDED_INPUTS = {
    "max_num_seqs": 64,
    "max_num_prefill_seqs": 3,
    "block_size": 128,
    "max_num_batched_tokens": 2000,
    "max_model_len": 4096,
    "num_blocks": 500,
}

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


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        (PaddedAxis(0, 8, 64, 64, 0), (0, 1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
        (PaddedAxis(0, 8, 64, 64, 50), (0, 1, 2, 4, 8, 16, 32, 64)),
        (PaddedAxis(0, 8, 64, 16, 50), (0, 1, 2, 4, 8, 16, 32, 48, 64)),
        (PaddedAxis(16, 16, 128, 32, 25), (16, 32, 48, 64, 80, 96, 128)),
        (PaddedAxis(0, 4, 0, 0, 25), (0,)),
        (PaddedAxis(1, 8, 100, 0, 50), (1, 2, 4, 8, 16, 32, 64, 100)),
    ],
)
def test_values_are_left_out_as_far_as_the_padding_allows(
    axis: PaddedAxis, expected: tuple[int, ...]
) -> None:
    assert padded_range(axis) == expected


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


def test_by_default_a_quarter_may_be_padding() -> None:
    prompt, decode = (
        padded_prompt_axes(BucketingInputs(**PADDED_INPUTS)),
        padded_decode_axes(BucketingInputs(**PADDED_INPUTS)),
    )

    assert prompt.batch_size == PaddedAxis(1, 1, 3, 1, 25)
    assert prompt.query_len == PaddedAxis(128, 128, 2000, 500, 25)
    assert prompt.context == PaddedAxis(0, 2, 31, 16, 25)
    assert decode.batch_size == PaddedAxis(1, 2, 64, 16, 25)
    assert decode.context == PaddedAxis(128, 128, 2048, 512, 25)


def test_a_persons_bounds_take_the_place_of_the_defaults_but_change_no_default_padding() -> None:
    inputs = BucketingInputs(
        **PADDED_INPUTS,
        prompt=PromptBounds(query_len=AxisBounds(max=1000, pad_percent=5)),
        decode=DecodeBounds(num_blocks=AxisBounds(min=600, max=1000, pad_max=7)),
    )

    assert padded_prompt_axes(inputs).query_len == PaddedAxis(128, 128, 1000, 500, 5)
    # The least is lowered below the cache's end, contiguous or not.
    assert padded_decode_axes(inputs).context == PaddedAxis(372, 128, 1000, 7, 25)


def test_merged_prefill_keeps_the_padding_of_a_batch_of_one() -> None:
    inputs = BucketingInputs(
        **PADDED_INPUTS, merged_prefill=True, prompt=PromptBounds(batch_size=AxisBounds(max=8, pad_max=9))
    )

    assert padded_prompt_axes(inputs).batch_size == PaddedAxis(1, 1, 1, 9, 25)
    assert padded_prompt_axes(inputs).query_len == PaddedAxis(128, 512, 2000, 500, 25)
    assert padded_prompt_axes(inputs).context == PaddedAxis(0, 4, 93, 16, 25)


def test_contiguous_contexts_end_at_the_cache() -> None:
    bounds = DecodeBounds(num_blocks=AxisBounds(max=9000))
    inputs = BucketingInputs(**PADDED_INPUTS, contiguous_pa=True, decode=bounds)

    assert padded_decode_axes(inputs).context == PaddedAxis(128, 128, 500, 125, 25)
