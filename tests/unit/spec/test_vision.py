"""Resolutions of images, as a spec writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.errors import SpecError
from aotgaudi.spec.vision import Resolution, VisionSpec, parse_resolution

sides = st.integers(1, 2**31 - 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("864x480", Resolution(864, 480)),
        (" 1120X1120 ", Resolution(1120, 1120)),
        ("10 x 20x4", Resolution(10, 20, 4)),
        ("864x480x1-20", Resolution(864, 480, (1, 20))),
        ("5x5x3-3", Resolution(5, 5, (3, 3))),
    ],
)
def test_a_resolution_may_say_how_many_images(text: str, expected: Resolution) -> None:
    assert parse_resolution(text) == expected


@given(sides, sides, st.none() | sides)
def test_what_is_written_is_read(width: int, height: int, num_images: int | None) -> None:
    text = f"{width}x{height}" if num_images is None else f"{width}x{height}x{num_images}"

    assert parse_resolution(text) == Resolution(width, height, num_images)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "864",
        "1x2x3x4",
        "5x5x3-2",
        "5x5x-3",
        "5x5x3-",
        "0x5",
        "-5x5",
        "5.5x5",
        "axb",
        "5x5x0",
        "2147483648x1",
        "9" * 5000,
    ],
)
def test_a_malformed_resolution_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(SpecError, match=r"vision\.resolutions\.1: is '.*WxHxN-M") as refusal:
        VisionSpec(resolutions=("864x480", text))

    assert len(str(refusal.value)) < 300
