"""Fused projections: linear layers that read the same activations become one, over the concatenated weights.

Queries, keys and values are three products of one input, gate and up are two. Fused, the input is read once, and a product
of few rows, which costs what reading the weights costs, pays its fixed costs once. The graph then takes one weight in place
of several. Its binding names them all, in order, and the server concatenates them when it loads the model.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from aotgaudi.graphs.layer_reuse import layer_of
from aotgaudi.graphs.program import join_bindings

_LINEAR = torch.ops.aten.linear.default


def fuse_projections(graph: fx.Graph, bindings: dict[str, str]) -> None:
    """Fuses linear layers in place. `bindings` of placeholders gets those of the concatenated weights.

    Fused are products of one decoder layer with the same input and dtype, all with a bias or all without, whose weights and
    biases are the checkpoint's and have no other use.
    """
    groups: dict[tuple[object, ...], list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is _LINEAR and _is_fusable(node, bindings):
            source, *weights = node.all_input_nodes
            key = (source, layer_of(node), len(weights), weights[0].meta["val"].dtype)
            groups.setdefault(key, []).append(node)
    for nodes in groups.values():
        if len(nodes) > 1:
            _fuse(graph, nodes, bindings)


def _is_fusable(node: fx.Node, bindings: dict[str, str]) -> bool:
    _, *weights = node.all_input_nodes
    return all(bindings.get(w.name, "").startswith("weight:") and len(w.users) == 1 for w in weights)


def _fuse(graph: fx.Graph, nodes: list[fx.Node], bindings: dict[str, str]) -> None:
    first, outputs = nodes[0], [node.meta["val"] for node in nodes]
    _, *rows = zip(*(node.all_input_nodes for node in nodes), strict=True)
    fused = [_placeholder(graph, weights, bindings) for weights in rows]
    with graph.inserting_before(first):
        product = _call(graph, first, torch.cat(outputs, -1), _LINEAR, first.args[0], *fused)
        sizes = [output.shape[-1] for output in outputs]
        parts = _call(graph, first, outputs, torch.ops.aten.split_with_sizes.default, product, sizes, -1)
        for number, (node, output) in enumerate(zip(nodes, outputs, strict=True)):
            node.replace_all_uses_with(_call(graph, first, output, operator.getitem, parts, number))
    for node in (*nodes, *(weight for weights in rows for weight in weights)):
        graph.erase_node(node)


def _placeholder(graph: fx.Graph, weights: Sequence[fx.Node], bindings: dict[str, str]) -> fx.Node:
    """Adds the input that stands for `weights`, concatenated."""
    with graph.inserting_before(weights[0]):
        fused = graph.placeholder(f"fused_{weights[0].name}")
    fused.meta["val"] = torch.cat([weight.meta["val"] for weight in weights])
    bindings[fused.name] = join_bindings(bindings[weight.name] for weight in weights)
    return fused


def _call(graph: fx.Graph, like: fx.Node, value: Any, target: Any, *args: Any) -> fx.Node:
    """Adds a call that belongs to the same layer as `like`."""
    node = graph.call_function(target, args)
    node.meta |= {"val": value, "nn_module_stack": like.meta.get("nn_module_stack")}
    return node
