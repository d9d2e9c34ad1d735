"""The vision tower's entries of a manifest."""

from __future__ import annotations

import pytest

from aotgaudi.entries import VisionEntry
from aotgaudi.manifest.enumerate import enumerate_entries
from aotgaudi.spec.vision import VisionSpec
from tests.workload import tiny_spec


def vision_entries(model_type: str, vision: VisionSpec) -> list[VisionEntry]:
    spec = tiny_spec()
    model = spec.model.model_copy(update={"config": {**spec.model.config, "model_type": model_type}})
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
