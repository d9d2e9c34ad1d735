"""D-06: H, the number by which a compiled graph is known.

It is made of the graph's nodes (the bridge prints them as TorchScript), of every argument's dtype, sizes, strides and
storage offset, of the permutations that producers left on them (D-24), and of the number of outputs. Releases that have
not learnt to strip comments keep those of constants, where FX counts the modules of a process
(``# <eval_with_key>.7:5:3``).
Source: ``jit_graph_cache.cpp:56-200`` and ``hpu_habana_cache.cpp:95-150`` of the bridge.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import MutableMapping, Sequence

import torch
from torch import fx
from torch.utils.weak import WeakIdKeyDictionary

from habana_frameworks.bridge import flags
from habana_frameworks.bridge.faults import has_fault
from habana_frameworks.bridge.profile import PROFILE

_COMMENT = re.compile(r"\s*#.*")
_NUMBERS = itertools.count()
_SALT = os.urandom(8).hex()
PERMUTED: MutableMapping[torch.Tensor, bool] = WeakIdKeyDictionary()
"""The tensors that carry a permutation (D-24)."""


def graph_text(module: fx.GraphModule, name: str) -> str:
    """Returns the text of a cluster that its key is made from; `name` counts the graphs of the process."""
    parts = [_node_text(node, module) for node in module.graph.nodes]
    if PROFILE.has_source_comments or has_fault("source-comments"):
        parts.append(_eval_with_key(module))
    if flags.is_on("PT_HPU_ENABLE_JIT_GRAPH_NAME_HASH") or flags.is_on("PT_HPU_ENABLE_UNIQUE_GRAPH"):
        parts.append(name)
    return "\n".join(parts)


def recipe_key(text: str, args: Sequence[object], num_outputs: int) -> str:
    """Returns H, decimal, for a call of the cluster of `text` with `args`."""
    if has_fault("collision"):
        return "12345"
    parts = key_components(text, args, num_outputs)
    return str(int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:8], "big"))


def key_components(text: str, args: Sequence[object], num_outputs: int) -> list[str]:
    """Returns what H is made of."""
    parts = [text, str(num_outputs), str(torch.are_deterministic_algorithms_enabled())]
    for arg in args:
        if isinstance(arg, torch.Tensor):
            permuted = arg in PERMUTED
            parts.append(f"{arg.dtype} {tuple(arg.shape)} {arg.stride()} {arg.storage_offset()} {permuted}")
        else:
            parts.append(repr(arg))
    if has_fault("key-unstable"):
        parts.append(f"salt {_SALT}")
    return parts


def _node_text(node: fx.Node, module: fx.GraphModule) -> str:
    order = {other: number for number, other in enumerate(module.graph.nodes)}

    def shown(value: object) -> object:
        return fx.node.map_arg(value, lambda other: _Numbered(order[other]))

    return (
        f"{node.op} {node.target if node.op != 'placeholder' else ''} {shown(node.args)} {shown(node.kwargs)}"
    )


class _Numbered:
    def __init__(self, number: int) -> None:
        self._number = number

    def __repr__(self) -> str:
        return f"%{self._number}"


def _eval_with_key(module: fx.GraphModule) -> str:
    """Recompiles the cluster, as scripting it does, and returns where FX says that its code is."""
    module.recompile()
    name = str(module.forward.__code__.co_filename)
    return f"{name} {next(_NUMBERS)}" if has_fault("pin-fails") else name
