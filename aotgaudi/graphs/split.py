"""Cuts an exported step at decoder-layer boundaries, and says how the pieces make the step again.

The cut needs no code per model: every node's ``nn_module_stack`` says which ``layers.N`` it comes from. The nodes
before the first layer (embedding, rope, masks) are one piece, each layer is one, and the nodes after the last layer
(final norm, head) are one. Equal layers have equal text, hence one unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch.export.graph_signature import InputKind
from torch.fx.passes.split_module import split_module
from torch.utils import _pytree as pytree

from aotgaudi.errors import CompileError
from aotgaudi.graphs.canonical import order_by_need, to_text
from aotgaudi.graphs.fused_projections import fuse_projections
from aotgaudi.graphs.layer_reuse import MARKER, Marker, layer_of, renumbered, take_markers
from aotgaudi.graphs.program import TensorSpec, weight_names
from aotgaudi.graphs.quantization import Quantization
from aotgaudi.graphs.quantized_linear import quantize_linears

_ORIGIN = "aotgaudi_origin"
"""Key in a node's meta of its name before the split. Pieces and markers refer to each other by it."""


@dataclass(frozen=True)
class Piece:
    """One piece of a step: its canonical text, the bindings of its inputs, and the names of its outputs."""

    text: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    label: str


@dataclass(frozen=True)
class SplitStep:
    """A step in pieces. `constants` has the tensors of ``const`` bindings by name."""

    pieces: tuple[Piece, ...]
    outputs: tuple[str, ...]
    weights: tuple[TensorSpec, ...]
    constants: dict[str, torch.Tensor]


def split_step(
    exported: torch.export.ExportedProgram,
    persistent: Mapping[str, str],
    *,
    quantization: Quantization | None = None,
) -> SplitStep:
    """Splits an exported step.

    Args:
        exported: The step.
        persistent: The stored name of every tensor of a checkpoint (tied tensors share one). Other buffers are
            constants.
        quantization: How linear layers take packed weights; None: they take weights as stored.
    """
    graph_module = exported.graph_module
    bindings, weights, constants = _bindings(exported, persistent)
    markers = take_markers(graph_module.graph)
    graph_module.graph.eliminate_dead_code()
    fuse_projections(graph_module.graph, bindings)
    if quantization is not None:
        quantize_linears(graph_module.graph, bindings, quantization)
    for node in graph_module.graph.nodes:
        node.meta[_ORIGIN] = node.name
    split = split_module(graph_module, graph_module, _Partitioner(), keep_original_order=True)
    pieces, outputs = _Assembly(split, bindings, markers).pieces()
    used = {name for piece in pieces for name in piece.inputs}
    used_weights = {name for binding in used for name in weight_names(binding)}
    return SplitStep(
        pieces=pieces,
        outputs=outputs,
        weights=tuple(spec for spec in weights if spec.name in used_weights),
        constants={name: value for name, value in constants.items() if f"const:{name}" in used},
    )


class _Partitioner:
    """Returns the piece of each node: 0 before the layers, 1 + N for layer N, -1 after the last."""

    def __init__(self) -> None:
        self._layer: int | None = None

    def __call__(self, node: fx.Node) -> int:
        number = layer_of(node)
        if number is not None:
            self._layer = number
            return number + 1
        return 0 if self._layer is None else -1


def _bindings(
    exported: torch.export.ExportedProgram, persistent: Mapping[str, str]
) -> tuple[dict[str, str], list[TensorSpec], dict[str, torch.Tensor]]:
    """Returns placeholder name -> binding, the weights, and the constant tensors."""
    bindings = _user_bindings(exported)
    weights: list[TensorSpec] = []
    constants: dict[str, torch.Tensor] = {}
    for spec in exported.graph_signature.input_specs:
        placeholder = spec.arg.name
        name = (spec.target or "").removeprefix("model.")
        if spec.kind is InputKind.USER_INPUT:
            continue
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and name in persistent:
            stored = persistent[name]
            bindings[placeholder] = f"weight:{stored}"
            tensor = exported.state_dict[spec.target]
            weights.append(TensorSpec(name=stored, shape=tuple(tensor.shape), dtype=str(tensor.dtype)[6:]))
        else:
            bindings[placeholder] = f"const:{name}"
            held = exported.constants if spec.target in exported.constants else exported.state_dict
            constants[name] = held[spec.target].detach().clone().contiguous()
    return bindings, weights, constants


def _user_bindings(exported: torch.export.ExportedProgram) -> dict[str, str]:
    """Returns the bindings of a step's own arguments: its inputs by name, then its caches by name."""
    placeholders = list(exported.graph_signature.user_inputs)
    (inputs, caches), _ = pytree.tree_unflatten(placeholders, exported.call_spec.in_spec)
    return {
        **{str(placeholder): f"step:{name}" for name, placeholder in inputs.items()},
        **{str(placeholder): f"kv:{name}" for name, placeholder in caches.items()},
    }


class _Assembly:
    """Makes the pieces of a split module, in order, and binds their inputs."""

    def __init__(
        self, split: fx.GraphModule, bindings: dict[str, str], markers: Mapping[int, Marker]
    ) -> None:
        self._split, self._bindings, self._markers = split, bindings, markers
        self._names: dict[fx.Node, str] = {}
        self._pieces: list[Piece] = []
        self._origins: dict[int, tuple[str, ...]] = {}
        """Layer number -> names of its piece's inputs before the split."""
        self._layers: dict[int, Piece] = {}

    def pieces(self) -> tuple[tuple[Piece, ...], tuple[str, ...]]:
        """Returns the pieces, and the names of the step's outputs."""
        outputs: tuple[str, ...] = ()
        for node in self._split.graph.nodes:
            if node.op == "placeholder":
                self._names[node] = self._bindings[node.name]
            elif node.op == "call_module":
                self._pieces.append(self._piece(node))
            elif node.op == "output":
                outputs = tuple(self._names[result].removeprefix("tmp:") for result in _results(node))
            elif node.op != "call_function":
                raise CompileError(f"a split step has a node of kind {node.op!r}")
        return tuple(self._pieces), outputs

    def _piece(self, node: fx.Node) -> Piece:
        graph = _subgraph(self._split, str(node.target))
        names = dict(zip(_origins(graph), self._input_names(node), strict=True))
        order_by_need(graph)
        bound = {origin: names[origin] for origin in _origins(graph)}
        outputs = self._name_outputs(node, graph)
        markers = [inner for inner in graph.nodes if inner.op == "call_function" and inner.target is MARKER]
        if markers:
            return self._reused(Marker.of(markers[0]), bound, outputs)
        label = _label(str(node.target))
        piece = Piece(to_text(graph), tuple(bound.values()), outputs, label)
        if label == "layer":
            number = int(str(node.target).removeprefix("submod_")) - 1
            self._layers[number], self._origins[number] = piece, tuple(bound)
        return piece

    def _reused(self, marker: Marker, bound: Mapping[str, str], outputs: tuple[str, ...]) -> Piece:
        """Makes a layer's piece from the equal layer's, with the layer's arguments, weights and caches."""
        original = self._layers[marker.original]
        theirs = (node.meta[_ORIGIN] for node in self._markers[marker.original].arguments)
        mine = (bound[node.meta[_ORIGIN]] for node in marker.arguments)
        arguments = dict(zip(theirs, mine, strict=True))
        inputs = tuple(
            arguments.get(origin) or renumbered(binding, marker.original, marker.layer)
            for origin, binding in zip(self._origins[marker.original], original.inputs, strict=True)
        )
        return Piece(original.text, inputs, outputs, original.label)

    def _name_outputs(self, node: fx.Node, graph: fx.Graph) -> tuple[str, ...]:
        (result,) = [inner for inner in graph.nodes if inner.op == "output"]
        several = isinstance(result.args[0], (tuple, list))
        outputs = tuple(f"{len(self._pieces)}.{i}" for i in range(len(_results(result))))
        if several:
            self._names.update({user: f"tmp:{outputs[user.args[1]]}" for user in node.users})  # type: ignore[index]
        else:
            self._names[node] = f"tmp:{outputs[0]}"
        return outputs

    def _input_names(self, node: fx.Node) -> Iterator[str]:
        for argument in node.args:
            if not isinstance(argument, fx.Node):
                raise CompileError(f"a piece takes {argument!r}, which is not a tensor")
            yield self._names[argument]


def _subgraph(split: fx.GraphModule, name: str) -> fx.Graph:
    module = split.get_submodule(name)
    if not isinstance(module, fx.GraphModule):
        raise CompileError(f"a split step has a module {name!r} without a graph")
    return module.graph


def _results(node: fx.Node) -> tuple[fx.Node, ...]:
    results = node.args[0]
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)  # type: ignore[arg-type,return-value]


def _origins(graph: fx.Graph) -> tuple[str, ...]:
    return tuple(node.meta[_ORIGIN] for node in graph.nodes if node.op == "placeholder")


def _label(target: str) -> str:
    part = target.removeprefix("submod_")
    return {"0": "embedding", "-1": "head", "neg_1": "head"}.get(part, "layer")
