"""What a manifest costs: too many steps, and device memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.entries import DecodeEntry, DefragEntry, Entry, PromptEntry, UnifiedEntry
from aotgaudi.errors import SpecError
from aotgaudi.manifest.cost import MANY_STEPS, counted_layers, estimate_memory, find_explosion, kv_cache_bytes
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import load_spec, spec_from_json
from tests import specs

MANIFESTS = Path(__file__).parents[3] / "manifests"
CONFIG = {
    "model_type": "llama",
    "max_position_embeddings": 512,
    "num_hidden_layers": 3,
    "hidden_size": 40,
    "intermediate_size": 100,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}


def spec_of(dtype: str = "bfloat16", **config: Any) -> BuildSpec:
    return specs.spec_of(model={"dtype": dtype}, config={**CONFIG, **config})


def test_kv_cache_is_two_tensors_a_layer_with_a_padding_block() -> None:
    assert kv_cache_bytes(spec_of()) == 25 * 16 * 2 * 2 * 10 * 2 * 3
    assert kv_cache_bytes(spec_of(dtype="float32")) == 2 * kv_cache_bytes(spec_of())
    assert kv_cache_bytes(spec_of(head_dim=16)) == 25 * 16 * 2 * 2 * 16 * 2 * 3
    assert kv_cache_bytes(spec_of(num_key_value_heads=None)) == 2 * kv_cache_bytes(spec_of())


def test_only_layers_that_keep_rows_are_counted_and_the_line_says_so() -> None:
    hybrid = spec_of(layer_types=["mamba", "attention", "mamba"])
    windows = spec_of(
        sliding_window=20, layer_types=["sliding_attention", "full_attention", "full_attention"]
    )

    assert kv_cache_bytes(hybrid) * 3 == kv_cache_bytes(spec_of())
    assert counted_layers(hybrid) == "rows of 1 of 3 layers, the states of 2 not counted"
    assert counted_layers(windows) == "1 of 3 layers with a window, all rows counted"
    assert counted_layers(spec_of()) is None


def test_where_the_config_does_not_tell_every_layer_is_counted_and_the_line_says_so() -> None:
    unknown = spec_of(mamba_d_state=16)

    assert kv_cache_bytes(unknown) == kv_cache_bytes(spec_of())
    assert counted_layers(unknown) == (
        "all 3 layers counted, as config.json does not tell which keep states in place of rows"
    )


def test_the_stage_with_most_rows_decides() -> None:
    types = ["attention", "mamba", "attention", "mamba", "mamba", "attention"]
    config = {**CONFIG, "num_hidden_layers": 6, "layer_types": types}

    stages = specs.spec_of(model={"dtype": "bfloat16"}, config=config, parallel={"pipeline_parallel_size": 2})

    assert kv_cache_bytes(stages) * 3 == kv_cache_bytes(spec_of()) * 2


def test_the_kv_cache_of_a_deepseek_v4_is_what_its_rows_take() -> None:
    """By hand: entries and index keys, tokens, and values and gates in float32."""
    compressed = {
        **CONFIG,
        "model_type": "deepseek_v4",
        "num_key_value_heads": 1,
        "head_dim": 8,
        "sliding_window": 6,
        "index_head_dim": 4,
        "index_topk": 2,
        "compress_ratios": [0, 4, 4],
    }
    spec = specs.spec_of(model={"dtype": "bfloat16"}, config=compressed)

    entries, tokens, raw = 2 * (4 * 8 + 4 * 4) * 2, 3 * 16 * 8 * 2, 2 * 16 * 2 * 2 * (8 + 4) * 4
    assert kv_cache_bytes(spec) == 25 * (entries + tokens + raw)


def with_tables(**tables: Any) -> BuildSpec:
    value = spec_of().to_json()
    value["model"].update(tables.pop("model", {}))
    return spec_from_json({**value, **tables})


def test_a_rank_keeps_its_share_of_the_kv_cache_and_one_head_at_least() -> None:
    def tensor_parallel(size: int) -> int:
        return kv_cache_bytes(with_tables(parallel={"tensor_parallel_size": size}))

    assert tensor_parallel(2) * 2 == kv_cache_bytes(spec_of())
    assert tensor_parallel(4) == tensor_parallel(2)
    assert (
        kv_cache_bytes(with_tables(parallel={"pipeline_parallel_size": 2})) * 3
        == kv_cache_bytes(spec_of()) * 2
    )


def test_a_kv_cache_of_fp8_has_half_the_bytes() -> None:
    halved = with_tables(model={"quantization": {"kv_cache_dtype": "fp8_inc"}})

    assert kv_cache_bytes(halved) * 2 == kv_cache_bytes(spec_of())
    assert kv_cache_bytes(with_tables(model={"quantization": {"method": "inc"}})) == kv_cache_bytes(spec_of())


def test_latent_attention_is_cached_whole_on_every_rank_by_vllm() -> None:
    config = {**CONFIG, "kv_lora_rank": 32, "qk_rope_head_dim": 8}
    tables: dict[str, Any] = {"scheduler": {"engine": "vllm"}, "parallel": {"tensor_parallel_size": 2}}

    assert kv_cache_bytes(with_tables(model={"config": config}, **tables)) == 25 * 16 * 40 * 2 * 3


def test_the_buffers_of_a_rank_hold_its_share_of_each_layer_and_the_whole_residual() -> None:
    entry = PromptEntry(2, 32, 3)
    estimate = estimate_memory(with_tables(parallel={"tensor_parallel_size": 2}), [entry])

    assert estimate.steps[0][1].activation_bytes == 64 * (2 * 40 + 3 * 50) * 2
    assert estimate.steps[0][1].kv_bytes == 2 * (2 * (3 * 16 + 32)) * 1 * 10 * 2
    assert estimate.steps[0][1].logit_bytes == 2 * 1000 * 4


def test_kv_cache_of_the_documented_example_is_121_megabytes() -> None:
    assert round(kv_cache_bytes(load_spec(MANIFESTS / "smollm2-135m.cpu.toml")) / 1e6) == 121


@pytest.mark.parametrize(
    ("entry", "tokens", "rows", "keys", "pairs"),
    [
        (PromptEntry(2, 32, 3), 64, 2, 2 * (3 * 16 + 32), 32 * 2 * (3 * 16 + 32)),
        (DecodeEntry(4, 1, 7), 4, 4, 7 * 16, 7 * 16),
        (UnifiedEntry(8, 2, 3, True), 8, 8, 5 * 16 + 8, 8 * (5 * 16 + 8)),
    ],
)
def test_buffers_of_a_step_follow_the_formula(
    entry: Entry, tokens: int, rows: int, keys: int, pairs: int
) -> None:
    estimate = estimate_memory(spec_of(), [entry])

    ((found, buffers),) = estimate.steps
    assert found == entry
    assert buffers.activation_bytes == tokens * (2 * 40 + 3 * 100) * 2
    assert buffers.kv_bytes == 2 * keys * 2 * 10 * 2
    assert buffers.mask_bytes == pairs * 2
    assert buffers.logit_bytes == rows * 1000 * 4
    assert estimate.total_bytes == estimate.kv_cache_bytes + buffers.total_bytes


def test_attention_counts_where_it_is_wider_than_the_feed_forward_part() -> None:
    ((_, buffers),) = estimate_memory(spec_of(intermediate_size=1), [DecodeEntry(1, 1, 1)]).steps

    assert buffers.activation_bytes == (2 * 40 + (2 * 4 + 2 * 2) * 10) * 2


@given(st.lists(st.builds(PromptEntry, st.integers(1, 9), st.integers(1, 99), st.integers(0, 9)), min_size=1))
def test_the_entry_of_a_kind_that_needs_most_is_the_one_that_counts(entries: list[Entry]) -> None:
    estimate = estimate_memory(spec_of(), entries)

    needs = [estimate_memory(spec_of(), [entry]).total_bytes for entry in entries]
    assert estimate.total_bytes == max(needs)


def test_a_manifest_without_steps_needs_its_kv_cache() -> None:
    estimate = estimate_memory(spec_of(), [DefragEntry(8)])

    assert estimate.steps == ()
    assert estimate.total_bytes == estimate.kv_cache_bytes


def test_a_config_without_the_sizes_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match=r"model\.config\.vocab_size: is missing"):
        estimate_memory(spec_of(vocab_size=None), [])


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
