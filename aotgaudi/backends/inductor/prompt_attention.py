"""Attention of prompts in units: a template of ours, ``prompt_attention.h``. Offline only.

Torch's own kernel computes what a mask hides, padding and later tokens, and its products in bfloat16 are slow where a CPU
has AVX512_BF16 and no tiles. There, and for bfloat16 alone, the template takes its place; elsewhere a graph stays as it is.
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
    """What the template computes: to be compiled, not to be run. A query that sees nothing gets zeros.

    The query [b, q, H, D], keys and values [b, K, k, D], what is seen [b, 1, q, k]. Returns [b, q, H, D].
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
    """Makes the attention of `graph` the template's where that can take it. Changes `graph`.

    `values` are what nodes have, of no contents.
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
    """Whether attention is of bfloat16, with a scale, and with a mask [b, 1, q, k] alone."""
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
"""What inductor makes of the operator."""
