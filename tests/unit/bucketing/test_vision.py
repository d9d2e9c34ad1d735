"""The vision tower: which list a model has, what a size is padded to, and how images are split into batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.vision import DEFAULT_SIZES, VisionBuckets, vision_sizes
from aotgaudi.spec.vision import VisionSpec

ON = VisionSpec(enabled=True)


def test_a_model_without_a_key_has_the_default() -> None:
    assert vision_sizes("", ON) == VisionBuckets(DEFAULT_SIZES.sizes, True)


@given(st.lists(st.integers(1, 1000), unique=True), st.integers(1, 2000))
def test_a_size_is_padded_to_the_next_or_stays(values: list[int], size: int) -> None:
    found = VisionBuckets(tuple(sorted(values)), is_batch=True).find(size)

    larger = [value for value in values if value >= size]
    assert found == min(larger, default=size)


def test_without_sizes_nothing_is_padded() -> None:
    assert VisionBuckets(None, is_batch=False).find(17) == 0
    assert VisionBuckets((), is_batch=False).find(17) == 17
