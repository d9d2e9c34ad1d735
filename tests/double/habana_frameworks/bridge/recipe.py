"""D-19: a recipe: what a cluster computes, as bytes that another process can run. Running it interprets it on the CPU.

Source: ``graph.cpp:53-66`` of the bridge for names, ``graph.cpp:845`` for the compile-only mode (D-17), Synapse's
``device_common.cpp:623`` for other types of device.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from habana_frameworks.bridge import flags
from habana_frameworks.bridge.faults import has_fault
from habana_frameworks.bridge.keys import PERMUTED
from habana_frameworks.bridge.profile import DEVICE

_MAGIC = b"aotgaudi double recipe\n"
_COUNTER = itertools.count()
_GARBAGE = 0x7F
_LONG, _MANY = 4096, 16
_INDEXED = (
    "index_select",
    "index_copy",
    "index_copy_",
    "index_add",
    "index_reduce",
    "index_fill",
    "gather",
    "scatter",
    "scatter_add",
)
"""Operators of a tensor, a dimension and indices into it."""
_KINDS = {
    "dtype": torch.dtype,
    "device": torch.device,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


class Recipe:
    """A compiled graph."""

    def __init__(self, data: bytes) -> None:
        """Raises ValueError for bytes that are no recipe."""
        if not data.startswith(_MAGIC):
            raise ValueError("Failed to deserialize recipe")
        try:
            self._content: Mapping[str, Any] = json.loads(zlib.decompress(data[len(_MAGIC) :]))
        except (zlib.error, ValueError) as error:
            raise ValueError("Failed to deserialize recipe") from error
        self.num_nodes = len(self._content["nodes"])

    @staticmethod
    def compile(module: fx.GraphModule) -> bytes:
        """Returns the recipe of a cluster. Its name ends in a counter of the process, so bytes differ (K-13)."""
        order = {node: number for number, node in enumerate(module.graph.nodes)}
        nodes = [
            [node.op, _target(node), _packed(node.args, order), _packed(node.kwargs, order)] for node in order
        ]
        content = {"device": DEVICE, "name": f"graph_recipe_{next(_COUNTER)}", "nodes": nodes}
        return _MAGIC + zlib.compress(json.dumps(content).encode())

    def launch(self, args: Sequence[Any]) -> list[Any]:
        """Runs on tensors of the device. Writes in place to those that the graph writes to.

        Raises:
            RuntimeError: it was compiled for another type of device.
        """
        if self._content["device"] != DEVICE:
            raise RuntimeError("synLaunch failed: synInvalidArgument")
        sources = [arg for arg in args if isinstance(arg, torch.Tensor)]
        aliases = [torch.ops.hpu_double.as_cpu(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        if flags.is_on("PT_COMPILE_ONLY_MODE"):  # D-17: nothing is computed, so no index can be out of range.
            metas = [arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in aliases]
            shapes = self._run(metas, "meta")
            outputs = [torch.empty_strided(one.size(), one.stride(), dtype=one.dtype) for one in shapes]
            for output in outputs:
                output.untyped_storage().fill_(_GARBAGE)
        else:
            outputs = self._run(aliases)
        if has_fault("wrong-numbers") and outputs and outputs[0].is_floating_point():
            outputs[0] = outputs[0] * 1.1
        found = [torch.ops.hpu_double.as_hpu(output, sources) for output in outputs]
        if any("mm" in str(row[1]) for row in self._content["nodes"]) and has_fault("late-recipe"):
            PERMUTED.update(dict.fromkeys(found, True))
        return found

    def _run(self, args: Sequence[Any], device: str = "cpu") -> list[Any]:
        values: list[Any] = []
        inputs = iter(args)
        places = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        workspace_bytes = 0
        for op, target, packed_args, packed_kwargs in self._content["nodes"]:
            node_args, kwargs = (_unpacked(packed, values, device) for packed in (packed_args, packed_kwargs))
            if op == "placeholder":
                values.append(next(inputs))
            elif op == "output":
                torch.empty(workspace_bytes, dtype=torch.uint8, device="hpu")  # D-22: taken while it runs.
                return node_args[0] if isinstance(node_args[0], list) else [node_args[0]]
            else:
                node_args = _wrapped(target, node_args)
                found = None if _is_unchecked(target) else _operator(target)(*node_args, **kwargs)
                values.append(_wronged(target, found))
                if (
                    isinstance(values[-1], torch.Tensor)
                    and values[-1].device.type == "cpu"
                    and values[-1].untyped_storage().data_ptr() not in places
                ):
                    places.add(values[-1].untyped_storage().data_ptr())
                    workspace_bytes += values[-1].untyped_storage().nbytes()
        raise ValueError("Failed to deserialize recipe")


def _wrapped(target: str, args: list[Any]) -> list[Any]:
    """D-27: indices are not checked, and negative ones count from the end, also where the CPU refuses them."""
    name = target.split(".")[1] if target.startswith("aten.") else ""
    if name == "embedding":
        sized, place, dim = args[0], 1, 0
    elif name in _INDEXED:
        sized, place, dim = args[0], 2, args[1]
    else:
        return args
    if has_fault("checked-indices") or args[place].device.type == "meta":
        return args
    indices = args[place]
    wrapped = torch.where(indices < 0, indices + sized.size(dim), indices)
    return [*args[:place], wrapped, *args[place + 1 :]]


def _is_unchecked(target: str) -> bool:
    """D-27: whether this is a check of indices, which the CPU makes in `one_hot`. Inferred: vllm-gaudi pads with -1."""
    return target == "aten._assert_async.msg" and not has_fault("checked-indices")


def _wronged(target: str, found: Any) -> Any:
    """What an operator gives where it is told to go wrong."""
    if target.startswith("hpu.sdpa") and has_fault("wrong-attention"):
        return (found[0] * 1.1, *found[1:])
    if target.startswith("aten.cumsum") and found.shape[-1] > _LONG and has_fault("wrong-long-sums"):
        return found * 1.1
    if target.startswith("aten.bmm") and len(found) > _MANY and has_fault("wrong-batches"):
        found[-1] = 0
    return found


def _target(node: fx.Node) -> str:
    if node.op != "call_function":
        return ""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    return f"operator.{node.target.__name__}"  # type: ignore[union-attr]


def _operator(target: str) -> Any:
    if target.startswith("operator."):
        import operator

        return getattr(operator, target.partition(".")[2])
    namespace, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _packed(value: Any, order: Mapping[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return {"node": order[value]}
    if isinstance(value, (list, tuple)):
        return [_packed(item, order) for item in value]
    if isinstance(value, dict):
        return {"dict": {name: _packed(item, order) for name, item in value.items()}}
    for kind, of in _KINDS.items():
        if isinstance(value, of):
            return {kind: "" if kind == "device" else str(value).removeprefix("torch.")}
    return value


def _unpacked(value: Any, values: Sequence[Any], device: str) -> Any:
    if isinstance(value, list):
        return [_unpacked(item, values, device) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "node":
        return values[content]
    if kind == "dict":
        return {name: _unpacked(item, values, device) for name, item in content.items()}
    return torch.device(device) if kind == "device" else getattr(torch, content)
