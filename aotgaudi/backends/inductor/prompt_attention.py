"""Attention of prompts, in units: our template ``prompt_attention.h``. Offline only.

Torch's kernel also computes what a mask hides (padding and later tokens), and its bfloat16 products are slow on a CPU with
AVX512_BF16 and no tiles. On such a CPU, and only for bfloat16, the template replaces it; other graphs stay unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from aotgaudi.backends.inductor.template import called

_SDPA = torch.ops.aten.scaled_dot_product_attention.default
_TRANSPOSE = torch.ops.aten.transpose.int
_CALL = r"""
  using Attention = aotgaudi::PromptAttention<{{head_size}}, {{group}}>;
  const Attention::Sizes sizes = {{"{%d, %d, %d}" % (queries, num_keys, kv_heads)}};
  Attention::run(query, keys, values, seen, {{batch}}, sizes, {{scaling}}f, output);
"""


@torch.library.custom_op("aotgaudi::prompt_attention", mutates_args=())
def prompt_attention(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scaling: float) -> Tensor:
    """Defines what the template computes. Compiled, never run. A query that sees nothing gets zeros.

    Query [b, q, H, D], keys and values [b, K, k, D], visible keys [b, 1, q, k]. Returns [b, q, H, D].
    """
    found = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2), keys, values, attn_mask=seen, scale=scaling, enable_gqa=True
    )
    return found.transpose(1, 2).contiguous()


@prompt_attention.register_fake
def _(query: Tensor, *_: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


PROMPT_ATTENTION = torch.ops.aotgaudi.prompt_attention.default


def take_template(graph: fx.Graph, values: Mapping[fx.Node, Tensor]) -> None:
    """Replaces attention in `graph` by the template where the template supports it. Changes `graph`.

    `values` has a tensor without contents for each node.
    """
    for node in graph.find_nodes(op="call_function", target=_SDPA):
        call = _arguments(node)
        if not _can_take(call, values):
            continue
        with graph.inserting_before(node):
            turned = graph.call_function(_TRANSPOSE, (call["query"], 1, 2))
            others = (call[name] for name in ("key", "value", "attn_mask", "scale"))
            result = graph.call_function(PROMPT_ATTENTION, (turned, *others))
            back = graph.call_function(_TRANSPOSE, (result, 1, 2))
        node.replace_all_uses_with(back)
        graph.erase_node(node)


def _arguments(node: fx.Node) -> Mapping[str, Any]:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    absent = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None}
    return {**absent, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def _can_take(call: Mapping[str, Any], values: Mapping[fx.Node, Tensor]) -> bool:
    """Whether attention is in bfloat16, with a scale, and with a mask [b, 1, q, k] as its only restriction."""
    if call["dropout_p"] or call["is_causal"] or call["attn_mask"] is None or call["scale"] is None:
        return False
    query, key, value, mask = (values[call[name]] for name in ("query", "key", "value", "attn_mask"))
    return (
        all(one.dtype is torch.bfloat16 and one.dim() == 4 for one in (query, key, value))
        and mask.dtype is torch.bool
        and mask.shape == (query.shape[0], 1, query.shape[2], key.shape[2])
        and key.shape == value.shape
        and query.shape[3] == key.shape[3]
    )


def _lower(query: Any, keys: Any, values: Any, seen: Any, scaling: float) -> Any:
    batch, queries, heads, head_size = map(int, query.get_size())
    kv_heads, num_keys = map(int, keys.get_size()[1:3])
    return called(
        "prompt_attention",
        _CALL,
        {"query": query, "keys": keys, "values": values, "seen": seen},
        query.get_size(),
        query.get_dtype(),
        batch=batch,
        queries=queries,
        num_keys=num_keys,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        head_size=head_size,
        scaling=repr(float(scaling)),
    )


LOWERINGS = {PROMPT_ATTENTION: _lower}
"""How inductor compiles the operator."""
