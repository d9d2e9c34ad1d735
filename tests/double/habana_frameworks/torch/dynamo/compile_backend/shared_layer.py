"""Which operators are lowered, and which fall back to the CPU (K-19). Source: ``shared_layer.py``, ``hpu_op*.yaml``."""

from __future__ import annotations

import torch
from torch import fx

from habana_frameworks.bridge.faults import has_fault

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


def name_of(node: fx.Node) -> str:
    """Returns the operator's name without its overload; empty for what is no operator."""
    return (
        node.target._schema.name.partition("::")[2] if isinstance(node.target, torch._ops.OpOverload) else ""
    )


def is_view(node: fx.Node) -> bool:
    """Returns whether a node's result shares the memory of its input."""
    return node.op == "call_function" and name_of(node) in VIEWS


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
