"""Which sizes of vision-tower input are warm: vllm_gaudi/extension/bucketing/vision.py at 091bbad.

A tower is sized by images (`is_batch`) or by patches. A model's list is the first one whose key is part of the
model's name, hyphens and dots left out: ``ovis`` therefore answers for ``ovis2.5`` as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from aotgaudi.errors import SpecError
from aotgaudi.spec.vision import Resolution, VisionSpec, parse_resolution

_PATCH_LADDER = (1600, 3136, 4096, 6400, 7744, 9216, 12544)
_PIXTRAL_LADDER = (512, *range(1024, 12289, 1024), 131076)
_MERGE_SIZE = 2
"""Patches are merged two by two (Qwen2.5-VL and Qwen3-VL), so that a grid is an even number of them wide."""

_ASPECT_RATIOS = ((1, 1), (4, 3), (3, 4), (16, 9), (9, 16))


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The public list of one family of models, and whether its sizes count images."""

    key: str
    sizes: tuple[int, ...]
    is_batch: bool = False


MODEL_SIZES = (
    ModelSizes("gemma-3", (1, 2, 4, 8), is_batch=True),
    ModelSizes("ovis", (1600, 3136, 4096, 6400)),
    ModelSizes("ovis2.5", (784, *_PATCH_LADDER)),
    ModelSizes("qwen2_5_vl", _PATCH_LADDER),
    ModelSizes("qwen3_vl", (196, 256, 441, 480, 576, 900, 1156)),
    ModelSizes("ernie4_5_moe_vl", _PATCH_LADDER),
    ModelSizes("pixtral", _PIXTRAL_LADDER),
    ModelSizes("mistral3", _PIXTRAL_LADDER),
    ModelSizes("deepseek_ocr", (1600, 2048, 3072, 6144, 8192, 131076)),
    ModelSizes("qwen3_5", ()),
    ModelSizes("kimi_k25", ()),
    ModelSizes("gemma4", ()),
)
"""In upstream's order, which decides; the towers without a size run at the resolution of each image."""

DEFAULT_SIZES = ModelSizes("", (1, 2, 4, 8), is_batch=True)
"""Of models that no key names."""


@dataclass(frozen=True, slots=True)
class VisionBuckets:
    """What is warm of one model's tower. `sizes` ascend; None: inputs are not padded at all."""

    sizes: tuple[int, ...] | None
    is_batch: bool
    resolutions: tuple[Resolution, ...] = ()

    def find(self, size: int) -> int:
        """Returns the smallest size that is at least `size`, else `size` itself; 0 where nothing is padded."""
        if self.sizes is None:
            return 0
        return next((found for found in self.sizes if found >= size), size)

    def image_resolutions(self, patch_size: int) -> tuple[tuple[int, int], ...]:
        """Returns the (width, height) in pixels that upstream warms for every size: five aspect ratios each."""
        return tuple(
            _image_resolution(size, ratio, patch_size)
            for size in self.sizes or ()
            for ratio in _ASPECT_RATIOS
        )


def vision_sizes(model_type: str, vision: VisionSpec) -> VisionBuckets:
    """Returns what is warm of a model's vision tower.

    Args:
        model_type: `model_type` of the model's config (hpu_model_runner.py 6176); a model's name does as well.
        vision: a person's sizes take the place of the model's; none at all stand for upstream's ``None``.
    """
    model = _sizes_of_model(model_type)
    sizes: tuple[int, ...] | None = model.sizes if vision.buckets is None else tuple(sorted(vision.buckets))
    if vision.buckets == ():
        sizes = None
    return VisionBuckets(sizes, model.is_batch, tuple(map(parse_resolution, vision.resolutions)))


def greedy_plan(num_images: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the batches that `num_images` are run in: the largest that fit, the last one padded.

    Raises:
        SpecError: there are no sizes, or one is below 1.
    """
    if not sizes or min(sizes) < 1:
        raise SpecError("vision.buckets", "has no size that images could be run in", "sizes of at least 1")
    plan: list[int] = []
    left = num_images
    for size in sorted(sizes, reverse=True):
        times, left = divmod(left, size)
        plan.extend([size] * times)
    return (*plan, min(sizes)) if left > 0 else tuple(plan)


def _sizes_of_model(model_type: str) -> ModelSizes:
    name = _bare(model_type.lower())
    return next((model for model in MODEL_SIZES if _bare(model.key) in name), DEFAULT_SIZES)


def _bare(name: str) -> str:
    return name.replace("-", "").replace(".", "")


def _image_resolution(num_patches: int, ratio: tuple[int, int], patch_size: int) -> tuple[int, int]:
    """Returns (width, height): a square grid of at most `num_patches`, stretched to the ratio."""
    grid_height = math.isqrt(num_patches)
    height = grid_height * patch_size
    grid_width = height * ratio[0] // ratio[1] // patch_size
    if grid_width * grid_height // _MERGE_SIZE != 0:
        grid_width = -(-grid_width // _MERGE_SIZE) * _MERGE_SIZE
    return grid_width * patch_size, height
