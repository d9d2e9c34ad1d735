"""Linear layers over packed weights: the operators of all quantizations, and the rewrite that puts them into a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, fx

from aotgaudi.graphs.program import rebound, weight_names
from aotgaudi.graphs.quantization import QUANTIZATIONS, Quantization

_LINEAR = torch.ops.aten.linear.default
_CHOICE = torch.ops.aten.topk.default


def _registered(quantization: Quantization) -> torch._ops.OpOverload:
    """Registers the operator of `quantization` with torch, its reference as the code, and returns it."""
    name = f"aotgaudi::{quantization.operator}"
    tensors = ", ".join(f"Tensor {source}" for source in quantization.sources)
    schema = f"(Tensor source, {tensors}, Tensor? bias) -> Tensor"
    operator = torch.library.custom_op(name, quantization.reference, mutates_args=(), schema=schema)
    operator.register_fake(_shape_of_product)
    found: torch._ops.OpOverload = getattr(torch.ops.aotgaudi, quantization.operator).default
    return found


def _shape_of_product(source: Tensor, weight: Tensor, *_: object) -> Tensor:
    """The first packed tensor has a row for each output."""
    return source.new_empty((*source.shape[:-1], weight.shape[0]))


OPERATORS: Mapping[str, torch._ops.OpOverload] = MappingProxyType(
    {name: _registered(quantization) for name, quantization in QUANTIZATIONS.items()}
)
"""By the quantization's name."""

INT8_LINEAR = OPERATORS["int8"]


def quantization_called(node: fx.Node) -> Quantization | None:
    """Returns the quantization whose operator `node` calls, or None."""
    return next((QUANTIZATIONS[name] for name, op in OPERATORS.items() if op is node.target), None)


def quantize_linears(graph: fx.Graph, bindings: dict[str, str], quantization: Quantization) -> None:
    """Makes linear layers over a checkpoint's weights take them packed, in place, where the quantization says so.

    `bindings` of placeholders gets those of the packed tensors. Other readers of a weight (a tied embedding) read it as
    stored.
    """
    for node in list(graph.nodes):
        if node.op == "placeholder" and bindings.get(node.name, "").startswith("weight:"):
            dtype = node.meta["val"].dtype
            products = [
                user
                for user in node.users
                if _is_product(user, node) and quantization.packs(dtype, is_choice=_chooses(user))
            ]
            if products:
                _quantize(graph, node, products, bindings, quantization)


def _is_product(user: fx.Node, weight: fx.Node) -> bool:
    """Whether `user` is a linear layer over `weight`."""
    return user.target is _LINEAR and user.args[1] is weight and weight not in (user.args[0], *user.args[2:])


def _chooses(product: fx.Node) -> bool:
    """Whether the largest of a product's results are picked before anything else is multiplied by weights."""
    products: tuple[Callable[..., object], ...] = (_LINEAR, *OPERATORS.values())
    seen: set[fx.Node] = set()
    ahead = list(product.users)
    while ahead:
        node = ahead.pop()
        if node.target is _CHOICE:
            return True
        if node not in seen and node.target not in products:
            seen.add(node)
            ahead += node.users
    return False


def _quantize(
    graph: fx.Graph,
    weight: fx.Node,
    products: list[fx.Node],
    bindings: dict[str, str],
    quantization: Quantization,
) -> None:
    value, names = weight.meta["val"], weight_names(bindings[weight.name])
    packed = []
    for kind, (shape, dtype) in zip(quantization.sources, quantization.layouts(value.shape), strict=True):
        with graph.inserting_before(weight):
            placeholder = graph.placeholder(f"{kind}_{weight.name}")
        placeholder.meta["val"] = value.new_empty(shape, dtype=dtype)
        bindings[placeholder.name] = rebound(kind, names)
        packed.append(placeholder)
    for product in products:
        source, _, *bias = product.args
        with graph.inserting_before(product):
            replacement = graph.call_function(
                OPERATORS[quantization.name], (source, *packed, *(bias or [None]))
            )
        replacement.meta |= product.meta
        product.replace_all_uses_with(replacement)
        graph.erase_node(product)
    if not weight.users:
        graph.erase_node(weight)
