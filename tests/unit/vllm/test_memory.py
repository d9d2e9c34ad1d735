from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.versions import VERSIONS
from aotgaudi.errors import SpecError
from aotgaudi.vllm.memory import kv_block_bytes, num_kv_blocks
from aotgaudi.vllm.model_facts import ModelFacts

GIB = 2**30
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def facts(**config: Any) -> ModelFacts:
    return ModelFacts.of(config, VERSIONS["vllm-gaudi@091bbad"].environment)


def test_the_example_of_upstreams_tuning_page() -> None:
    """79.22 GiB free, 71.3 usable, 7.13 reserved for graphs, 64.17 for the cache, in blocks of 16 MiB."""
    assert num_kv_blocks(int(79.22 * GIB), 0.9, 0.1, 16 * 2**20, num_dummy_blocks=0) == 4106
    assert num_kv_blocks(int(79.22 * GIB), 0.9, 0.1, 16 * 2**20) == 4105


def test_no_block_fits() -> None:
    assert num_kv_blocks(100, 0.9, 0.1, 200) == 0


@given(
    st.integers(1, 2**40),
    st.floats(0.01, 1),
    st.floats(0, 0.99),
    st.integers(1, 2**30),
    st.integers(0, 1),
)
def test_the_blocks_and_the_dummy_fit_and_one_more_does_not(
    free: int, share: float, reserved: float, block: int, dummies: int
) -> None:
    blocks = num_kv_blocks(free, share, reserved, block, num_dummy_blocks=dummies)
    usable = free * share * (1 - reserved)

    assert (blocks + dummies) * block <= usable * (1 + 1e-9) or blocks == 0
    assert (blocks + dummies + 1) * block > usable * (1 - 1e-9) - block * 1e-9


@given(st.integers(1, 2**40), st.integers(1, 2**40), st.integers(1, 2**30))
def test_more_memory_is_never_fewer_blocks(one: int, other: int, block: int) -> None:
    less, more = sorted((one, other))

    assert num_kv_blocks(less, 0.9, 0.1, block) <= num_kv_blocks(more, 0.9, 0.1, block)


def test_bytes_of_a_block_of_llama_8b() -> None:
    assert kv_block_bytes(facts(**LLAMA), 128, "bfloat16") == 128 * 2 * 8 * 128 * 2 * 32 == 16 * 2**20


def test_a_head_dim_of_its_own_and_as_many_kv_heads_as_heads() -> None:
    config = {**LLAMA, "head_dim": 64, "num_key_value_heads": None}

    assert kv_block_bytes(facts(**config), 16, "float32") == 16 * 2 * 32 * 64 * 4 * 32


def test_one_latent_vector_a_token_with_mla() -> None:
    config = {**LLAMA, "kv_lora_rank": 512, "qk_rope_head_dim": 64}

    assert kv_block_bytes(facts(**config), 128, "bfloat16") == 128 * 576 * 2 * 32


def test_keys_of_a_multimodal_config_are_the_language_models() -> None:
    config = {"model_type": "x_vl", "vision_config": {}, "text_config": LLAMA}

    assert kv_block_bytes(facts(**config), 128, "bfloat16") == 16 * 2**20


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_missing_key_is_named_with_the_way_round(name: str) -> None:
    config = {key: value for key, value in LLAMA.items() if key != name}

    with pytest.raises(SpecError, match=rf"has no {name} \(a positive integer, or --num-blocks N\)"):
        kv_block_bytes(facts(**config), 128, "bfloat16")


def test_unlike_layers_are_not_counted() -> None:
    with pytest.raises(SpecError, match=r"unlike caches \(--num-blocks N\)"):
        kv_block_bytes(facts(**LLAMA, layer_types=["mamba", "attention"]), 128, "bfloat16")
