"""The vision tower's sizes, look-ups and plans: what the public code gave for each row of ``vision.jsonl.gz``."""

from __future__ import annotations

from typing import Any

import pytest

from aotgaudi.bucketing.vision import VisionBuckets, vision_sizes
from aotgaudi.errors import SpecError
from aotgaudi.from_vllm.serving import ServingEnvironment
from aotgaudi.spec.vision import Resolution, VisionSpec
from tests.golden.rows import Row, each_of, read_rows

CHECKED = {
    "buckets",
    "is_batch_based",
    "resolutions",
    "lookup",
    "bucket_to_image_resolution_p14",
    "error",
}
NOT_OURS = {"greedy_plan"}
"""How a server splits a call with several images into batches; a manifest only has the batches."""

REQUEST = {"id", "version", "fn", "env", "model_name"}


def buckets_of(row: Row) -> VisionBuckets:
    serving = ServingEnvironment.parse(row["env"], row["version"])
    vision = VisionSpec(enabled=True, buckets=serving.vision_buckets, resolutions=serving.vision_resolutions)
    return vision_sizes(row["model_name"], vision)


def as_upstream(resolution: Resolution) -> list[Any]:
    width, height, num_images = resolution
    return [width, height, list(num_images) if isinstance(num_images, tuple) else num_images]


@each_of(read_rows("bucketing/vision.jsonl.gz"))
def test_sizes_and_plans_equal_the_public_code(row: Row) -> None:
    assert row["fn"] == "vision.HPUVisionBucketManager"
    assert row.keys() <= CHECKED | NOT_OURS | REQUEST, "a field that nothing compares"
    if "error" in row:
        with pytest.raises(SpecError):
            buckets_of(row)
        return

    found = buckets_of(row)

    assert (found.sizes if found.sizes is None else list(found.sizes)) == row["buckets"]
    assert found.is_batch == row["is_batch_based"]
    assert list(map(as_upstream, found.resolutions)) == row["resolutions"]
    assert [[size, found.find(size)] for size, _ in row["lookup"]] == row["lookup"]
    if "bucket_to_image_resolution_p14" in row:
        assert [list(size) for size in found.image_resolutions(14)] == row["bucket_to_image_resolution_p14"]
