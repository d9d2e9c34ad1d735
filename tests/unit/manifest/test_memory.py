"""How many bytes caches, steps and weights take, and how many KV blocks fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aotgaudi.cli.options import parse_byte_count
from aotgaudi.entries import DecodeEntry, DefragEntry, Entry, PromptEntry, UnifiedEntry
from aotgaudi.errors import SpecError, TargetError
from aotgaudi.machine import Memory
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.memory import (
    DRIFT_BYTES,
    KvCache,
    MemoryNeed,
    counted_layers,
    described_cache,
    dtype_bytes,
    kv_cache_bytes,
    memory_option,
    with_kv_cache_memory,
)
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import load_spec, spec_from_json
from tests import specs

GIB = 1 << 30
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
CARD = {"backend": "hpu"}


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
    need = MemoryNeed.of(with_tables(parallel={"tensor_parallel_size": 2}), [entry])

    assert need.steps[0][1].activation_bytes == 64 * (2 * 40 + 3 * 50) * 2
    assert need.steps[0][1].kv_bytes == 2 * (2 * (3 * 16 + 32)) * 1 * 10 * 2
    assert need.steps[0][1].logit_bytes == 2 * 1000 * 4


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
    need = MemoryNeed.of(specs.spec_of(model={"dtype": "bfloat16"}, config=CONFIG, target=CARD), [entry])

    ((found, buffers),) = need.steps
    assert found == entry
    assert buffers.activation_bytes == tokens * (2 * 40 + 3 * 100) * 2
    assert buffers.kv_bytes == 2 * keys * 2 * 10 * 2
    assert buffers.mask_bytes == pairs * 2
    assert buffers.logit_bytes == rows * 1000 * 4
    assert need.total_bytes == need.cache_bytes + buffers.total_bytes


def test_attention_counts_where_it_is_wider_than_the_feed_forward_part() -> None:
    ((_, buffers),) = MemoryNeed.of(spec_of(intermediate_size=1), [DecodeEntry(1, 1, 1)]).steps

    assert buffers.activation_bytes == (2 * 40 + (2 * 4 + 2 * 2) * 10) * 2


@given(st.lists(st.builds(PromptEntry, st.integers(1, 9), st.integers(1, 99), st.integers(0, 9)), min_size=1))
def test_the_entry_of_a_kind_that_needs_most_is_the_one_that_counts(entries: list[Entry]) -> None:
    need = MemoryNeed.of(spec_of(), entries)

    needs = [MemoryNeed.of(spec_of(), [entry]).total_bytes for entry in entries]
    assert need.total_bytes == max(needs)


def test_a_manifest_without_steps_needs_its_kv_cache() -> None:
    need = MemoryNeed.of(spec_of(), [DefragEntry(8)])

    assert need.steps == ()
    assert need.total_bytes == need.cache_bytes


def test_a_config_without_the_sizes_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match=r"model\.config\.vocab_size: is missing"):
        MemoryNeed.of(spec_of(vocab_size=None), [])


def test_a_decode_of_our_own_on_a_cpu_reads_its_blocks_where_they_are() -> None:
    entries = [PromptEntry(1, 16, 1), DecodeEntry(1, 1, 2)]

    of_cpu, of_card, of_vllm = (
        dict(MemoryNeed.of(specs.spec_of(config=CONFIG, **tables), entries).steps)
        for tables in (
            {},
            {"target": CARD},
            {"scheduler": {"engine": "vllm"}},
        )
    )

    assert of_cpu[entries[1]] == replace(of_card[entries[1]], kv_bytes=0)
    assert of_card[entries[1]].kv_bytes > 0
    assert of_card == of_vllm
    assert of_cpu[entries[0]] == of_card[entries[0]]


@pytest.mark.parametrize(
    ("dtype", "num_bytes"),
    [("float32", 4), ("bfloat16", 2), ("int64", 8), ("uint8", 1), ("bool", 1), ("float8_e4m3fn", 1)],
)
def test_the_name_of_a_dtype_says_its_bytes(dtype: str, num_bytes: int) -> None:
    assert dtype_bytes(dtype) == num_bytes


def need_of(num_blocks: int, **changes: Any) -> MemoryNeed:
    need = MemoryNeed.of(spec_of(), Manifest.of(spec_of()).entries)
    return replace(need, num_blocks=num_blocks, **changes)


@given(st.integers(0, 1 << 22), st.integers(0, 1 << 20), st.integers(0, 1 << 20))
def test_the_blocks_that_fit_are_the_most_that_fit(free: int, weights: int, reserved: int) -> None:
    need = need_of(1, weights_bytes=weights, reserved_bytes=reserved)

    fitting = need.blocks_that_fit(free)

    assert replace(need, num_blocks=fitting).total_bytes <= free or not fitting
    assert replace(need, num_blocks=fitting + 1).total_bytes > free


@given(st.integers(1, 10_000), st.integers(0, 64 * GIB), st.integers(0, 64 * GIB), st.booleans())
def test_what_does_not_fit_is_refused_in_one_line_and_what_that_names_fits(
    num_blocks: int, free: int, weights: int, is_open: bool
) -> None:
    need, memory = need_of(num_blocks, weights_bytes=weights, is_open=is_open), Memory(64 * GIB, free)
    assume(need.total_bytes > free)

    with pytest.raises(TargetError, match="target: this machine has too little memory: weights") as told:
        need.require(memory, "this machine")

    text, fitting = str(told.value), need.blocks_that_fit(free - DRIFT_BYTES * is_open)
    if fitting < need.fewest_blocks:
        fitting = need.blocks_that_fit(free)
    assert told.value.exit_code == 5
    assert "\n" not in text
    if fitting < need.fewest_blocks:
        assert text.endswith(f"needs {need.fewest_blocks}" if fitting else "no number of KV blocks would fit")
        return
    replace(need, num_blocks=fitting).require(memory, "this machine")
    assert f"limits.num_blocks may be {fitting:,} at most" in text
    assert ("--kv-cache-memory" in text) == is_open
    if is_open:
        given_bytes = parse_byte_count(text.rsplit(" ", 1)[1])
        assert with_kv_cache_memory(spec_of(), given_bytes).limits.num_blocks == fitting


@given(st.integers(0, 1 << 24))
def test_the_memory_of_a_kv_cache_gives_the_most_blocks_that_it_holds(more: int) -> None:
    cache, limits = KvCache.of(spec_of()), spec_of().limits
    num_bytes = cache.num_bytes(limits.max_blocks_per_seq) + more

    spec = with_kv_cache_memory(spec_of(), num_bytes)

    assert kv_cache_bytes(spec) <= num_bytes < kv_cache_bytes(spec) + cache.block_bytes
    assert spec.limits == limits.model_copy(update={"num_blocks": spec.limits.num_blocks})


@given(st.integers(1, 1 << 24))
def test_memory_for_less_than_a_sequence_is_refused_with_what_it_needs(less: int) -> None:
    fewest = spec_of().limits.max_blocks_per_seq
    num_bytes = max(0, KvCache.of(spec_of()).num_bytes(fewest) - less)

    with pytest.raises(SpecError, match=f"max_model_len 128 needs {fewest}") as told:
        with_kv_cache_memory(spec_of(), num_bytes)

    least = parse_byte_count((told.value.remedy or "").rsplit(" ", 1)[1])
    assert with_kv_cache_memory(spec_of(), least).limits.num_blocks == fewest


@given(st.integers(1, 1 << 49))
def test_a_size_is_written_as_options_read_it(num_bytes: int) -> None:
    assert parse_byte_count(memory_option(num_bytes)) == num_bytes


@pytest.mark.parametrize(("num_reserved", "num_blocks"), [(0, 4106), (1, 4105)])
def test_the_example_of_vllm_gaudis_tuning_page(num_reserved: int, num_blocks: int) -> None:
    """79.22 GiB free, 71.3 usable, 7.13 reserved for graphs, 64.17 for the cache, in blocks of 16 MiB."""
    block_bytes = 16 << 20

    cache = KvCache(block_bytes, fixed_bytes=num_reserved * block_bytes)

    assert cache.blocks_in(int(79.22 * GIB) * 0.9 * (1 - 0.1)) == num_blocks


@given(st.floats(0, 2**40), st.integers(1, 2**30), st.integers(0, 1))
def test_a_cache_holds_its_blocks_and_not_one_more(
    usable: float, block_bytes: int, num_reserved: int
) -> None:
    cache = KvCache(block_bytes, fixed_bytes=num_reserved * block_bytes)

    num_blocks = cache.blocks_in(usable)

    assert cache.num_bytes(num_blocks) <= usable * (1 + 1e-9) or num_blocks == 0
    assert cache.num_bytes(num_blocks + 1) > usable * (1 - 1e-9) or num_blocks == 2**31 - 1


def test_a_cache_is_told_in_tokens_and_sequences() -> None:
    limits = spec_of().limits

    assert described_cache(limits, GIB) == (
        f"1.00 GiB, {limits.num_blocks} blocks of {limits.block_size} tokens:"
        f" {limits.num_blocks * limits.block_size:,} tokens, or {limits.num_blocks // limits.max_blocks_per_seq} sequences"
        f" of max_model_len {limits.max_model_len}; max_num_seqs is {limits.max_num_seqs}"
    )
