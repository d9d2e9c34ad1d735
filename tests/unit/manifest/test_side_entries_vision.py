"""The vision tower's entries of a manifest."""

from __future__ import annotations

import pytest

from aotgaudi.entries import VisionEntry
from aotgaudi.errors import SpecError
from aotgaudi.manifest.enumerate import enumerate_entries
from aotgaudi.spec.vision import VisionSpec
from tests.workload import tiny_spec


def vision_entries(model_type: str, vision: VisionSpec, **config: object) -> list[VisionEntry]:
    spec = tiny_spec()
    config = {**spec.model.config, "model_type": model_type, **config}
    model = spec.model.model_copy(update={"config": config})
    spec = spec.model_copy(update={"vision": vision, "model": model})
    return [entry for entry in enumerate_entries(spec) if isinstance(entry, VisionEntry)]


@pytest.mark.parametrize(
    ("model_type", "vision", "expected"),
    [
        ("gemma3", VisionSpec(), []),
        ("gemma3", VisionSpec(enabled=True), [(1, True), (2, True), (4, True), (8, True)]),
        ("pixtral", VisionSpec(enabled=True, buckets=(2048, 512, 512)), [(512, False), (2048, False)]),
        ("pixtral", VisionSpec(enabled=True, buckets=()), []),
        ("gemma4", VisionSpec(enabled=True), []),
    ],
)
def test_the_sizes_of_the_models_tower_are_warm_where_vision_is_on(
    model_type: str, vision: VisionSpec, expected: list[tuple[int, bool]]
) -> None:
    assert [entry.row() for entry in vision_entries(model_type, vision)] == expected


def sizes(model_type: str, *resolutions: str, max_images: int = 1, patch_size: int = 16) -> list[int]:
    vision = VisionSpec(enabled=True, resolutions=resolutions, max_images=max_images)
    tower = {"patch_size": patch_size, "spatial_merge_size": 2}
    return [entry.size for entry in vision_entries(model_type, vision, vision_config=tower)]


def test_each_number_of_images_of_a_resolution_is_a_size_where_the_tower_does_not_pad() -> None:
    """864x480 is 27 by 15 merged patches of 32 pixels: 54 * 30 patches."""
    assert sizes("qwen3_5") == []
    assert sizes("qwen3_5", "864x480") == [1620]
    assert sizes("qwen3_5", "864x480", max_images=3) == [3 * 1620]
    assert sizes("qwen3_5", "864x480x2", max_images=3) == [2 * 1620]
    assert sizes("qwen3_5", "864x480x1-20", max_images=3) == [1620, 2 * 1620, 3 * 1620]
    assert sizes("qwen3_5", "864x480x1-20", "864x480x1") == [1620]


def test_the_images_that_upstream_guesses_for_a_size_are_warm_as_well() -> None:
    """Of 196 patches, 14 by 14: 14x14, 4:3 as 18x14, 3:4 as 10x14, 16:9 as 24x14, 9:16 as 8x14."""
    assert {14 * 14, 18 * 14, 10 * 14, 24 * 14, 8 * 14} <= set(sizes("qwen3_vl"))


def test_a_tower_that_pads_each_image_runs_the_next_size_or_the_images_own() -> None:
    listed = sizes("qwen2_5_vl", patch_size=14)

    assert set(sizes("qwen2_5_vl", "560x560x7", max_images=9, patch_size=14)) == set(listed)
    assert set(sizes("qwen2_5_vl", "2800x2800", patch_size=14)) - set(listed) == {200 * 200}


@pytest.mark.parametrize(
    ("model_type", "config", "problem"),
    [
        ("gemma3", {"vision_config": {"patch_size": 14}}, "by the number of images"),
        ("kimi_k25", {"vision_config": {"patch_size": 14}}, "how its processor cuts images is not known"),
        ("qwen3_5", {}, r"no vision_config\.patch_size"),
        ("qwen3_5", {"vision_config": {"patch_size": "14"}}, r"no vision_config\.patch_size"),
    ],
)
def test_resolutions_that_cannot_become_entries_are_refused(
    model_type: str, config: dict[str, object], problem: str
) -> None:
    vision = VisionSpec(enabled=True, resolutions=("864x480",))

    with pytest.raises(SpecError, match=rf"vision\.resolutions: .*{problem}"):
        vision_entries(model_type, vision, **config)
