"""How many KV blocks fit: upstream's formula, over memory figures that a person gives.

Upstream measures free memory when a server starts, so that two starts may count differently; and the tables of
buckets, and every recipe that holds the cache, depend on the count. Here it is a function of what is written.

The formula is that of vllm_gaudi/v1/worker/hpu_worker.py 395-450 (``determine_available_memory``) followed by
vllm/v1/core/kv_cache_utils.py (``get_num_blocks``), in double precision and in that order. vllm-fork's V0 engine
(vllm/worker/hpu_worker.py 342-390) sets no dummy block aside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aotgaudi.errors import SpecError
from aotgaudi.vllm.model_facts import ModelFacts

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_WHERE = "the model's config.json"


def num_kv_blocks(
    free_bytes: int, utilization: float, reserved: float, block_bytes: int, *, num_dummy_blocks: int = 1
) -> int:
    """Returns the blocks that upstream would allocate; 0 where not one fits.

    Args:
        free_bytes: free device memory after the model is loaded and profiled.
        utilization: --gpu-memory-utilization, the usable share of it.
        reserved: VLLM_GRAPH_RESERVED_MEM, the share of that for graphs.
        block_bytes: bytes of one block, over all layers.
        num_dummy_blocks: blocks that are set aside for padding.
    """
    usable = free_bytes * utilization * (1 - reserved)
    return max(0, int((usable - num_dummy_blocks * block_bytes) // block_bytes))


def kv_block_bytes(facts: ModelFacts, block_size: int, dtype: str) -> int:
    """Returns the bytes of one KV block over all layers: keys and values, or one latent vector (MLA).

    Raises:
        SpecError: a key that the config lacks; or a model whose layers keep unlike caches, where upstream's count
            follows from how it groups them.
    """
    if facts.has_mamba or facts.has_interleaved_windows:
        raise SpecError(
            "--free-memory",
            "does not tell the blocks of a model whose layers keep unlike caches",
            "--num-blocks N",
        )
    text = facts.text
    layers = _count(text, "num_hidden_layers")
    if "kv_lora_rank" in text and text["kv_lora_rank"] is not None:
        values = _count(text, "kv_lora_rank") + _count(text, "qk_rope_head_dim")
    else:
        heads = _count(text, "num_attention_heads")
        kv_heads = heads if text.get("num_key_value_heads") is None else _count(text, "num_key_value_heads")
        values = 2 * kv_heads * _head_dim(text, heads)
    return block_size * values * _BYTES[dtype] * layers


def _head_dim(text: Mapping[str, Any], heads: int) -> int:
    if text.get("head_dim") is not None:
        return _count(text, "head_dim")
    return _count(text, "hidden_size") // heads


def _count(text: Mapping[str, Any], name: str) -> int:
    value = text.get(name)
    if type(value) is not int or value < 1:
        problem = f"has no {name}" if value is None else f"has {name} {value!r}"
        raise SpecError(_WHERE, problem, "a positive integer, or --num-blocks N")
    return value
