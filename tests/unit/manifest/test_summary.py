"""What a manifest costs: too many steps."""

from __future__ import annotations

from typing import Any

from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.summary import MANY_STEPS, find_explosion
from aotgaudi.spec.build_spec import BuildSpec
from tests import specs


def spec_with(bucketing: dict[str, Any] | None = None, **limits: int) -> BuildSpec:
    large = {
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "max_model_len": 32768,
        "block_size": 128,
        "num_blocks": 4127,
    }
    return specs.spec_of(
        model={"name": "large", "dtype": "bfloat16"},
        config={"max_position_embeddings": 131072},
        limits={**large, **limits},
        bucketing=bucketing or {},
    )


def test_as_many_steps_as_anyone_compiles_are_no_explosion() -> None:
    assert find_explosion(Manifest.of(spec_with())) is None


def test_one_step_too_many_is_one_and_the_numbers_are_its_own() -> None:
    steps = tuple(PromptEntry(1, 1, index) for index in range(MANY_STEPS))

    assert find_explosion(Manifest(spec_with(), steps)) is None
    found = find_explosion(Manifest(spec_with(), (*steps, DecodeEntry(1, 1, 1))))

    assert found is not None
    assert found.num_steps == {"prompt": MANY_STEPS, "decode": 1, "unified": 0}
    assert found.compile_seconds == (MANY_STEPS + 1) * 14


def test_a_linear_spec_is_told_what_exponential_bucketing_would_make_of_it() -> None:
    linear = Manifest.of(spec_with({"strategy": "linear"}))
    exponential = Manifest.of(spec_with({"strategy": "exponential"}))
    num_steps = len(exponential.of_kind("prompt")) + len(exponential.of_kind("decode"))

    found = find_explosion(linear)

    assert found is not None
    assert found.remedies[0][1] == num_steps < found.total
    assert f"bucketing.strategy = 'exponential' ({num_steps:,})" in str(found)
    assert f"{found.total:,} step programs" in str(found)
    assert f"{found.total * 14 / 3600:,.1f} hours" in str(found)
