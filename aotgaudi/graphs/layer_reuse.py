"""Layer reuse: equal decoder layers are traced once, and the other layers reuse that trace.

Exporting a step costs about a millisecond per node, and nearly all nodes belong to layers that are copies of
one another. While `reusing_layers` is active, a layer that looks like an earlier one (same modules, shapes,
attributes and arguments) puts a single marker node into the graph instead of its nodes. Splitting then makes
the layer's pieces from the earlier layer's, and binds the layer's weights, caches and arguments to them.

Looking alike is a guess: code may still depend on a layer's number. So the tracer compares the result with
a full trace once for each model and kind of step (trace.py), and traces every layer where they differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from aotgaudi.graphs.program import rebound, weight_names

LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)(?=\.|$)")
"""The name of a decoder layer in module paths."""

_IGNORED_ATTRIBUTES = frozenset({"layer_idx", "forward"})


@torch.library.custom_op("aotgaudi::layer", mutates_args=())
def layer_marker(tensors: list[Tensor], layer: int, original: int) -> Tensor:
    """Stands for a call of decoder layer `layer`, which equals layer `original`. It is replaced before anything runs."""
    raise RuntimeError("a layer marker is not meant to run")


@layer_marker.register_fake
def _(tensors: list[Tensor], layer: int, original: int) -> Tensor:
    return torch.empty_like(tensors[0])


MARKER = torch.ops.aotgaudi.layer.default


@dataclass(frozen=True)
class Marker:
    """A marker in a graph: the layer, the earlier layer that it equals (itself if it was traced), the argument nodes."""

    layer: int
    original: int
    arguments: tuple[fx.Node, ...]

    @classmethod
    def of(cls, node: fx.Node) -> Marker:
        """Reads a marker node."""
        tensors, layer, original = node.args
        return cls(int(str(layer)), int(str(original)), tuple(n for n in tensors if isinstance(n, fx.Node)))  # type: ignore[union-attr]


@contextmanager
def reusing_layers(model: nn.Module) -> Iterator[None]:
    """While active, each call of a decoder layer leaves a marker, and only the first of equal layers is traced."""
    layers = _decoder_layers(model)
    originals: dict[Any, int] = {}
    try:
        for number, layer in layers.items():
            layer.forward = _Reuse(layer, number, originals)
        yield
    finally:
        for layer in layers.values():
            del layer.forward


class _Reuse:
    """Replaces one layer's ``forward``."""

    def __init__(self, layer: nn.Module, number: int, originals: dict[Any, int]) -> None:
        self._forward, self._number, self._originals = layer.forward, number, originals
        self._looks = _looks(layer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        looks = (self._looks, str(structure), tuple(_leaf_looks(leaf) for leaf in leaves))
        original = self._originals.setdefault(looks, self._number)
        marker = layer_marker(tensors, self._number, original)
        if original != self._number:
            return marker
        result = self._forward(*args, **kwargs)
        if not (isinstance(result, Tensor) and _leaf_looks(result) == _leaf_looks(tensors[0])):
            del self._originals[
                looks
            ]  # A marker cannot stand for this result, so every such layer is traced.
        return result


def take_markers(graph: fx.Graph) -> Mapping[int, Marker]:
    """Removes the markers of traced layers. Returns every marker by layer number.

    Arguments that the traced layer does not use are dropped from all markers, so that markers add no data flow.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function" and node.target is MARKER]
    markers = {marker.layer: marker for marker in map(Marker.of, nodes)}
    kept = {
        number: tuple(_uses(marker.layer, argument) for argument in marker.arguments)
        for number, marker in markers.items()
        if marker.layer == marker.original
    }
    for node in nodes:
        marker = Marker.of(node)
        arguments = tuple(a for a, keep in zip(marker.arguments, kept[marker.original], strict=True) if keep)
        markers[marker.layer] = Marker(marker.layer, marker.original, arguments)
        node.args = (list(arguments), marker.layer, marker.original)
        if marker.layer == marker.original:
            graph.erase_node(node)
    return markers


def layer_of(node: fx.Node) -> int | None:
    """Returns the number of the decoder layer whose trace made a node, or None."""
    for path, _ in (node.meta.get("nn_module_stack") or {}).values():
        if found := LAYER.search(path):
            return int(found.group(1))
    return None


def _uses(layer: int, argument: fx.Node) -> bool:
    return any(layer_of(user) == layer and user.target is not MARKER for user in argument.users)


def renumbered(binding: str, original: int, layer: int) -> str:
    """Returns the binding of layer `layer` that corresponds to a weight, constant or cache binding of layer `original`."""
    source, _, name = binding.partition(":")
    if source == "kv":
        number, dot, part = name.partition(".")
        return f"kv:{layer}{dot}{part}" if number == str(original) else binding
    if names := weight_names(binding):
        return rebound(source, (_renumbered_name(name, original, layer) for name in names))
    return f"const:{_renumbered_name(name, original, layer)}" if source == "const" else binding


def _renumbered_name(name: str, original: int, layer: int) -> str:
    found = LAYER.search(f".{name}")
    if found is None or int(found.group(1)) != original:
        return name
    start, end = found.start(1) - 1, found.end(1) - 1
    return f"{name[:start]}{layer}{name[end:]}"


def _decoder_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Returns the layers of the model's decoder stack by number."""
    layers = {}
    for name, module in model.named_modules():
        if (found := LAYER.search(f".{name}")) and found.end() == len(name) + 1:
            layers[int(found.group(1))] = module
    return layers


def _looks(layer: nn.Module) -> Any:
    """Returns everything that a layer's computation can depend on, except its number and its weights."""
    return tuple(
        (
            name,
            type(module),
            tuple((n, t.shape, t.dtype) for n, t in module._parameters.items() if t is not None),
            tuple((n, t.shape, t.dtype) for n, t in module._buffers.items() if t is not None),
            tuple((n, _leaf_looks(v)) for n, v in sorted(vars(module).items()) if _is_attribute(n)),
        )
        for name, module in layer.named_modules()
    )


def _is_attribute(name: str) -> bool:
    return not name.startswith("_") and name not in _IGNORED_ATTRIBUTES


def _leaf_looks(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return ("tensor", tuple(leaf.shape), leaf.dtype, leaf.stride())
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return leaf
    if isinstance(leaf, (list, tuple)):
        return tuple(_leaf_looks(item) for item in leaf)
    if type(leaf) is dict:
        return tuple((str(key), _leaf_looks(item)) for key, item in leaf.items())
    return id(leaf)
