"""The vision tower of multimodal models: which sizes are warm."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, NamedTuple, Union

from pydantic import Field, field_validator

from aotgaudi.errors import SpecError, shown
from aotgaudi.spec.base import SpecValue
from aotgaudi.spec.limits import LARGEST_LIMIT

MOST_IMAGES = 10_000
"""Images of a prompt; each number of them may be an entry."""

_DIGITS = re.compile(r"[0-9]{1,10}")
_RESOLUTION = re.compile(r"([^x]*)x([^x]*)(?:x([^x-]*)(?:-([^x]*))?)?")


class Resolution(NamedTuple):
    """Images of one size, `width` by `height` pixels.

    `num_images` in a call: a number, the least and the most, or (None) as many as the server takes.
    """

    width: int
    height: int
    num_images: Union[int, tuple[int, int], None] = None

    def counts(self, max_images: int) -> range:
        """Returns the numbers of images in a call, none above `max_images` (hpu_model_runner.py 6055-6063)."""
        if isinstance(self.num_images, tuple):
            fewest, most = self.num_images
            return range(fewest, min(most, max_images) + 1)
        count = max_images if self.num_images is None else min(self.num_images, max_images)
        return range(count, count + 1)


class VisionSpec(SpecValue):
    """Off unless `enabled`.

    `buckets` (VLLM_MULTIMODAL_BUCKETS): sizes in place of the model's list; None: the model's; empty: inputs are not
    padded. `resolutions` (VLLM_MULTIMODAL_RESOLUTIONS): ``WxH``, ``WxHxN`` or ``WxHxN-M``, pixels and images; they
    count for towers that are sized by patches, if the config says how many patches an image has.
    `max_images` (--limit-mm-per-prompt): images that a prompt may have, which bounds those of a call.
    """

    ABSENT_BY_DEFAULT: ClassVar[frozenset[str]] = frozenset({"max_images"})

    enabled: bool = False
    buckets: tuple[Annotated[int, Field(ge=1, le=LARGEST_LIMIT)], ...] | None = None
    resolutions: tuple[str, ...] = ()
    max_images: int = Field(default=1, ge=1, le=MOST_IMAGES)

    @field_validator("resolutions")
    @classmethod
    def _check_resolutions(cls, resolutions: tuple[str, ...]) -> tuple[str, ...]:
        for index, text in enumerate(resolutions):
            parse_resolution(text, f"vision.resolutions.{index}")
        return resolutions


def parse_resolution(text: str, where: str = "VLLM_MULTIMODAL_RESOLUTIONS") -> Resolution:
    """Returns what ``WxH``, ``WxHxN`` or ``WxHxN-M`` stands for. Raises SpecError, naming `where`."""
    found = _RESOLUTION.fullmatch(text.strip().lower())
    numbers = [] if found is None else [_positive(part) for part in found.groups() if part is not None]
    match numbers:
        case [int(width), int(height)]:
            return Resolution(width, height)
        case [int(width), int(height), int(images)]:
            return Resolution(width, height, images)
        case [int(width), int(height), int(fewest), int(most)] if fewest <= most:
            return Resolution(width, height, (fewest, most))
    raise SpecError(where, f"is {shown(text)}", "WxH, WxHxN or WxHxN-M: pixels, and images with 1 <= N <= M")


def _positive(text: str) -> int | None:
    """Returns a whole number from 1 to the largest limit, or None."""
    digits = text.strip()
    if not _DIGITS.fullmatch(digits):
        return None
    value = int(digits)
    return value if 1 <= value <= LARGEST_LIMIT else None
