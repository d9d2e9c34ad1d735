from __future__ import annotations

from typing import Any

from aotgaudi.manifest.difference import differences
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.parse import spec_from_json


def manifest_of(*, config: dict[str, Any] | None = None, **limits: int) -> Manifest:
    return Manifest.of(
        spec_from_json(
            {
                "schema": "aotgaudi.spec/1",
                "model": {
                    "name": "tiny",
                    "dtype": "float32",
                    "config": {"model_type": "llama", "max_position_embeddings": 512, **(config or {})},
                },
                "limits": {
                    "max_num_seqs": 1,
                    "max_num_batched_tokens": 32,
                    "max_model_len": 32,
                    "block_size": 16,
                    "num_blocks": 8,
                    **limits,
                },
            }
        )
    )


def test_equal_manifests_have_no_differences() -> None:
    assert differences(manifest_of(), manifest_of()) == ()


def test_a_changed_limit_and_its_entries_are_named() -> None:
    assert differences(manifest_of(), manifest_of(max_model_len=48)) == (
        "limits.max_model_len: 32 -> 48",
        "prompt entries: +2 (prompt, 1, 16, 2) (prompt, 1, 32, 2)",
        "decode entries: +1 (decode, 1, 1, 3)",
    )
    assert differences(manifest_of(max_model_len=48), manifest_of())[1] == (
        "prompt entries: -2 (prompt, 1, 16, 2) (prompt, 1, 32, 2)"
    )


def test_many_entries_are_counted_and_only_some_shown() -> None:
    line = next(row for row in differences(manifest_of(), manifest_of(max_num_seqs=2)) if "sampler" in row)

    assert line.startswith("sampler entries: +12 (sampler, 2, 0.0, 1.0, 0, True) ")
    assert line.endswith(" ...")
    assert line.count("(sampler") == 3


def test_another_order_of_the_same_entries_is_a_difference() -> None:
    manifest = manifest_of()
    turned = Manifest(manifest.spec, (manifest.entries[1], manifest.entries[0], *manifest.entries[2:]))

    assert differences(manifest, turned) == ("prompt entries: in another order",)


def test_a_config_key_that_comes_or_goes_is_named() -> None:
    assert differences(manifest_of(), manifest_of(config={"x": {"y": 1}})) == (
        "model.config.x: (absent) -> {'y': 1}",
    )
