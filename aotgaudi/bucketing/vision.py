"""Which sizes of vision-tower input are warm: vllm_gaudi/extension/bucketing/vision.py at 091bbad.

A tower is sized by images (`is_batch`) or by patches. A model's list is the first one whose key is part of the model's name,
without hyphens and dots. So ``ovis`` also applies to ``ovis2.5``.

A tower that is sized by patches is also warmed for images: for every size one image of each of five aspect ratios, and the
resolutions that the user names (v1/worker/hpu_model_runner.py 6010-6080). An image has as many patches as its processor cuts
it into. Qwen2.5-VL pads each image to the next size (models/qwen2_5_vl.py 380-400). The other towers take all images of a
call at once, unpadded, so each number of images is a separate shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from aotgaudi.errors import SpecError
from aotgaudi.spec.model import ModelSpec
from aotgaudi.spec.vision import Resolution, VisionSpec, parse_resolution

_PATCH_LADDER = (1600, 3136, 4096, 6400, 7744, 9216, 12544)
_PIXTRAL_LADDER = (512, *range(1024, 12289, 1024), 131076)
_MERGE_SIZE = 2
"""Patches are merged two by two (Qwen2.5-VL and Qwen3-VL), so a grid is an even number of patches wide."""

_PADS_EACH_IMAGE = "qwen2_5_vl"
_RESIZES_TO_MERGED_PATCHES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
"""The models whose processor rounds each side of an image to whole merged patches (transformers' ``smart_resize``)."""

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
"""In upstream's order: the first match wins. Towers without a size run at the resolution of each image."""

DEFAULT_SIZES = ModelSizes("", (1, 2, 4, 8), is_batch=True)
"""The sizes for models that no key names."""


@dataclass(frozen=True, slots=True)
class VisionBuckets:
    """The warm shapes of one model's tower. `sizes` ascend; None means that inputs are not padded."""

    sizes: tuple[int, ...] | None
    is_batch: bool
    resolutions: tuple[Resolution, ...] = ()

    def find(self, size: int) -> int:
        """Returns the smallest size that is at least `size`, else `size` itself; 0 if nothing is padded."""
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
    """Returns the warm shapes of a model's vision tower.

    Args:
        model_type: `model_type` of the model's config (hpu_model_runner.py 6176), or a model's name.
        vision: its sizes replace the model's. An empty list means upstream's ``None``.
    """
    model = _sizes_of_model(model_type)
    sizes: tuple[int, ...] | None = model.sizes if vision.buckets is None else tuple(sorted(vision.buckets))
    if vision.buckets == ():
        sizes = None
    return VisionBuckets(sizes, model.is_batch, tuple(map(parse_resolution, vision.resolutions)))


def warm_sizes(model: ModelSpec, vision: VisionSpec) -> tuple[int, ...]:
    """Returns the sizes of everything that a model's tower is warmed for, each once, the listed ones first.

    Images are assumed to be within their processor's pixel bounds, which a config.json does not contain.

    Raises:
        SpecError: resolutions are given, but their number of patches is unknown or has no effect.
    """
    found = vision_sizes(model.model_type, vision)
    cut = _Cut.of(model)
    if vision.resolutions:
        _check_resolutions(model, found, cut)
    images = _image_sizes(found, cut, vision.max_images) if cut and not found.is_batch else ()
    return tuple(dict.fromkeys((*(found.sizes or ()), *images)))


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a processor cuts an image into square patches of `patch_size` pixels, of which `merge` a side are merged."""

    patch_size: int
    merge: int
    pads_each: bool

    @classmethod
    def of(cls, model: ModelSpec) -> _Cut | None:
        """Returns the cut of a model; None if it is unknown."""
        tower = model.config.get("vision_config")
        patch_size = tower.get("patch_size") if isinstance(tower, dict) else None
        if not isinstance(tower, dict) or type(patch_size) is not int or patch_size < 1:
            return None
        if not any(_bare(key) in _bare(model.model_type.lower()) for key in _RESIZES_TO_MERGED_PATCHES):
            return None
        merge = tower.get("spatial_merge_size", _MERGE_SIZE)
        merge = merge if type(merge) is int and merge > 0 else _MERGE_SIZE
        return cls(patch_size, merge, _bare(_PADS_EACH_IMAGE) in _bare(model.model_type.lower()))

    def num_patches(self, width: int, height: int) -> int:
        """Returns how many patches an image has."""
        return self._side(width) * self._side(height)

    def _side(self, pixels: int) -> int:
        return max(1, round(pixels / (self.patch_size * self.merge))) * self.merge


def _check_resolutions(model: ModelSpec, found: VisionBuckets, cut: _Cut | None) -> None:
    if found.is_batch:
        raise SpecError(
            "vision.resolutions",
            f"change nothing: upstream sizes the tower of {model.model_type!r} by the number of images",
            "leave them out",
        )
    if cut is None:
        raise SpecError(
            "vision.resolutions",
            f"cannot be counted in patches: of {model.model_type!r} the config has no vision_config.patch_size, or how"
            " its processor cuts images is not known",
            "vision.buckets, the sizes in patches",
        )


def _image_sizes(found: VisionBuckets, cut: _Cut, max_images: int) -> Iterator[int]:
    """Yields the size of each call that is warmed: first single images of the guessed resolutions, then the named ones."""
    guessed = (Resolution(width, height, 1) for width, height in found.image_resolutions(cut.patch_size))
    for image in (*guessed, *found.resolutions):
        patches = cut.num_patches(image.width, image.height)
        if cut.pads_each:
            yield max(patches, found.find(patches))
        else:
            yield from (patches * count for count in image.counts(max_images))


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
