"""Makes linear layers of a step take their weights in 8 bits.

A weight is kept as integers and one scale an output channel (`runtime/int8.py` makes them, once, where a model is loaded);
activations stay what they are.
"""

from __future__ import annotations

import torch
from torch import fx

from aotgaudi.graphs.int8_linear import INT8_LINEAR
from aotgaudi.graphs.program import INT8, INT8_SCALES, rebound, weight_names

_LINEAR = torch.ops.aten.linear.default
_CHOICE = torch.ops.aten.topk.default
_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})


def quantize_linears(graph: fx.Graph, bindings: dict[str, str]) -> None:
    """Makes linear layers over a checkpoint's weights take them in 8 bits, in place.

    `bindings` of placeholders gets those of integers and scales. What else reads a weight (a tied embedding) reads it as it
    is stored. Layers that choose, as routers of experts do, stay as they are: they are small, and a choice is not made a
    little differently.
    """
    for node in list(graph.nodes):
        if node.op == "placeholder" and bindings.get(node.name, "").startswith("weight:"):
            users = [user for user in node.users if _is_product(user, node)]
            if users and node.meta["val"].dtype in _FLOATS:
                _quantize(graph, node, users, bindings)


def _is_product(user: fx.Node, weight: fx.Node) -> bool:
    """Whether `user` is a linear layer over `weight`, and chooses nothing."""
    return (
        user.target is _LINEAR
        and user.args[1] is weight
        and weight not in (user.args[0], *user.args[2:])
        and not _chooses(user)
    )


def _chooses(product: fx.Node) -> bool:
    """Whether the largest of a product's results are picked before anything else is multiplied by weights."""
    seen: set[fx.Node] = set()
    ahead = list(product.users)
    while ahead:
        node = ahead.pop()
        if node.target is _CHOICE:
            return True
        if node not in seen and node.target not in (_LINEAR, INT8_LINEAR):
            seen.add(node)
            ahead += node.users
    return False


def _quantize(graph: fx.Graph, weight: fx.Node, products: list[fx.Node], bindings: dict[str, str]) -> None:
    value = weight.meta["val"]
    with graph.inserting_before(weight):
        integers, scales = (graph.placeholder(f"{kind}_{weight.name}") for kind in (INT8, INT8_SCALES))
    integers.meta["val"] = value.new_empty(value.shape, dtype=torch.int8)
    scales.meta["val"] = value.new_empty(value.shape[:1], dtype=torch.float32)
    names = weight_names(bindings[weight.name])
    bindings[integers.name], bindings[scales.name] = rebound(INT8, names), rebound(INT8_SCALES, names)
    for product in products:
        source, _, *bias = product.args
        with graph.inserting_before(product):
            replacement = graph.call_function(INT8_LINEAR, (source, integers, scales, *(bias or [None])))
        replacement.meta |= product.meta
        product.replace_all_uses_with(replacement)
        graph.erase_node(product)
    if not weight.users:
        graph.erase_node(weight)
