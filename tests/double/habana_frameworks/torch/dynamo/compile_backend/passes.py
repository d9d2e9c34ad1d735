"""D-05: what is lowered (K-19), and what is compiled together. Rules of the bridge's ``passes.py``, written anew.

Source: ``passes.py:2014-2096`` (views), ``2575-2637`` (in place), ``2807-2831`` (fallbacks);
``shared_layer.py``, ``hpu_op*.yaml`` (operators).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from habana_frameworks.bridge.faults import has_fault
from habana_frameworks.bridge.journal import emit, note
from habana_frameworks.torch.dynamo.compile_backend import config

_NEVER = frozenset({"addcmul", "index", "nonzero", "seed", "slice_backward", "bincount", "_unique2"})
VIEWS = frozenset(
    {
        *(
            "view",
            "_unsafe_view",
            "as_strided",
            "as_strided_scatter",
            "slice",
            "select",
            "squeeze",
            "unsqueeze",
        ),
        *("expand", "transpose", "t", "permute", "split", "split_with_sizes", "alias"),
    }
)


_COLLECTIVES = "_c10d_functional"
"""Its operators run between clusters (D-31; ``pass_allreduce_parents``, PT_HPU_ENABLE_ALLREDUCE_GRAPH_SPLIT's default)."""


def name_of(node: fx.Node) -> str:
    """Returns the operator's name without its overload; empty for what is no operator."""
    return (
        node.target._schema.name.partition("::")[2] if isinstance(node.target, torch._ops.OpOverload) else ""
    )


def is_view(node: fx.Node) -> bool:
    """Returns whether a node's result shares the memory of its input."""
    return node.op == "call_function" and name_of(node) in VIEWS


def is_collective(node: fx.Node) -> bool:
    """Returns whether a node exchanges tensors with other ranks, or waits for them."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == _COLLECTIVES


def falls_back(node: fx.Node) -> bool:
    """Returns whether a node runs on the CPU."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    name, value = name_of(node), node.meta.get("val")
    if name in _NEVER or (name == "index_copy" and has_fault("fallback-op")):
        return True
    if name == "index_put" and any(index is None for index in node.args[1]):  # type: ignore[union-attr]
        return True
    if name == "permute" and isinstance(value, torch.Tensor) and value.dtype is torch.int64:
        return True
    if name in ("full", "mul") and isinstance(node.args[1], bool):
        return True
    return any(isinstance(arg, float) and arg != arg for arg in node.args)


def place(module: fx.GraphModule) -> frozenset[fx.Node]:
    """Returns the nodes that run outside clusters: collectives, those not lowered, and views that are outputs (K-34)."""
    nodes = list(module.graph.nodes)
    eager = {node for node in nodes if is_collective(node) or falls_back(node)}
    for node in nodes:
        if node in eager and not is_collective(node):
            emit("CPU_FALLBACK", op=name_of(node))
    for node in reversed(nodes):
        if node.op == "output" or node in eager:
            views = {source for source in node.all_input_nodes if is_view(source)}
            if views and not has_fault("leaf-views"):
                eager |= views
    return frozenset(eager)


def check_eager_fallbacks(eager: frozenset[fx.Node]) -> None:
    """K-18: without fallback, a node outside a cluster is an assertion, unless it is a collective."""
    names = sorted(str(node.target) for node in eager if not is_collective(node))
    if names and not config.use_eager_fallback and not has_fault("silent-fallback"):
        raise AssertionError(f"eager fallback is disabled, and these nodes are not in a cluster: {names}")


def reinplace_index_copy(module: fx.GraphModule) -> None:
    """K-21: ``index_copy`` of an input and ``copy_`` back into it become one operator in place.

    Only where the input has exactly these two users; else the whole input is copied.
    """
    if not config.use_inplace_index_copy:
        return
    for node in list(module.graph.nodes):
        if name_of(node) != "copy_" or node.args[0].op != "placeholder":
            continue
        cache, copied = node.args[:2]
        is_pair = isinstance(copied, fx.Node) and name_of(copied) == "index_copy" and copied.args[0] is cache
        if is_pair and set(cache.users) == {node, copied} and not has_fault("no-inplace"):
            copied.target = torch.ops.aten.index_copy_.default
            node.replace_all_uses_with(copied)
            module.graph.erase_node(node)
            note(event="CACHE_WRITE", in_place=True)
        else:
            note(event="CACHE_WRITE", in_place=False)
    module.graph.lint()
    module.recompile()


class _Lowered(OperatorSupportBase):
    def __init__(self, eager: frozenset[fx.Node]) -> None:
        self._eager = eager

    def is_node_supported(self, submodules: object, node: fx.Node) -> bool:
        del submodules
        is_operator = isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
        return node.op == "call_function" and is_operator and node not in self._eager


def partition(
    module: fx.GraphModule, eager: frozenset[fx.Node], compiled: Callable[[fx.GraphModule], torch.nn.Module]
) -> Sequence[str]:
    """Replaces each cluster of `module` by what `compiled` makes of it. Returns the clusters' names."""
    partitioner = CapabilityBasedPartitioner(module, _Lowered(eager), allows_single_node_partition=True)
    partitioner.fuse_partitions(partitioner.propose_partitions(), prefix="hpu_cluster_")
    names = [name for name, _ in module.named_children() if name.startswith("hpu_cluster_")]
    for name in names:
        setattr(module, name, compiled(getattr(module, name)))
    module.recompile()
    return names
