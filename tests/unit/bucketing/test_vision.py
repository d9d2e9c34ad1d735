"""The vision tower: which list a model has, what a size is padded to, and how images are split into batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.vision import DEFAULT_SIZES, VisionBuckets, vision_sizes
from aotgaudi.spec.vision import Resolution, VisionSpec

ON = VisionSpec(enabled=True)


@pytest.mark.parametrize(
    ("model_type", "first", "is_batch"),
    [
        ("gemma3", 1, True),
        ("Gemma-3-27b", 1, True),
        ("qwen2_5_vl", 1600, False),
        ("qwen3_vl_moe", 196, False),
        # An earlier key that is part of the name wins: ovis, not ovis2.5, whose list begins at 784.
        ("ovis2.5", 1600, False),
        ("llava", 1, True),
    ],
)
def test_a_model_has_the_list_of_the_first_key_in_its_name(
    model_type: str, first: int, is_batch: bool
) -> None:
    found = vision_sizes(model_type, ON)

    assert found.sizes is not None
    assert (found.sizes[0], found.is_batch) == (first, is_batch)


def test_a_model_without_a_key_has_the_default() -> None:
    assert vision_sizes("", ON) == VisionBuckets(DEFAULT_SIZES.sizes, True)


def test_a_persons_sizes_take_the_place_of_the_models() -> None:
    assert vision_sizes("gemma3", VisionSpec(buckets=(9, 4))).sizes == (4, 9)
    assert vision_sizes("gemma3", VisionSpec(buckets=())).sizes is None


def test_resolutions_are_read() -> None:
    found = vision_sizes("qwen3_5", VisionSpec(resolutions=("864x480", "10X20x1-3")))

    assert found.resolutions == (Resolution(864, 480), Resolution(10, 20, (1, 3)))
    assert found.sizes == ()


@given(st.lists(st.integers(1, 1000), unique=True), st.integers(1, 2000))
def test_a_size_is_padded_to_the_next_or_stays(values: list[int], size: int) -> None:
    found = VisionBuckets(tuple(sorted(values)), is_batch=True).find(size)

    larger = [value for value in values if value >= size]
    assert found == min(larger, default=size)


def test_without_sizes_nothing_is_padded() -> None:
    assert VisionBuckets(None, is_batch=False).find(17) == 0
    assert VisionBuckets((), is_batch=False).find(17) == 17


def test_every_size_has_five_resolutions() -> None:
    found = VisionBuckets((1600,), is_batch=False).image_resolutions(14)

    assert found == ((560, 560), (756, 560), (420, 560), (1008, 560), (308, 560))
    assert VisionBuckets(None, is_batch=False).image_resolutions(14) == ()
