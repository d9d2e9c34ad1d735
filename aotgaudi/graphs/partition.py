"""Cuts an exported step at decoder-layer boundaries, and says how the pieces make the step again.

The cut needs no code per model: every node's ``nn_module_stack`` says which ``layers.N`` it comes from. The nodes
before the first layer (embedding, rope, masks) are one piece, each layer is one, and the nodes after the last layer
(final norm, head) are one. A call of an operator that is a unit of its own (`OWN_UNITS`) is a piece, too, and cuts
its layer in two. Equal layers have equal text, hence one unit.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind
from torch.fx.passes.split_module import split_module
from torch.utils import _pytree as pytree

from aotgaudi.errors import CompileError
from aotgaudi.graphs.canonical import order_by_need, to_text
from aotgaudi.graphs.fused_projections import fuse_projections
from aotgaudi.graphs.hyper_connections import HC_PRE, text_of_call
from aotgaudi.graphs.layer_reuse import MARKER, Marker, layer_of, renumbered, take_markers
from aotgaudi.graphs.program import TensorSpec, weight_names
from aotgaudi.graphs.quantization import Quantization
from aotgaudi.graphs.quantized_linear import quantize_linears

_ORIGIN = "aotgaudi_origin"
"""Key in a node's meta of its name before the partition. Pieces and markers refer to each other by it."""


OWN_UNITS: Mapping[Any, tuple[str, Callable[[fx.Node], str]]] = MappingProxyType(
    {HC_PRE: ("hc_pre", text_of_call)}
)
"""Operators whose calls are pieces: the piece's label, and what gives its text. Its inputs are the call's tensors in order,
its outputs are the operator's."""

_LABELS_OF_UNITS = frozenset(label for label, _ in OWN_UNITS.values())


@dataclass(frozen=True)
class Piece:
    """One piece of a step: its canonical text, the bindings of its inputs, and the names of its outputs."""

    text: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    label: str


@dataclass(frozen=True)
class PartitionedStep:
    """A step in pieces. `constants` has the tensors of ``const`` bindings by name."""

    pieces: tuple[Piece, ...]
    outputs: tuple[str, ...]
    weights: tuple[TensorSpec, ...]
    constants: dict[str, torch.Tensor]


def partition_step(
    exported: torch.export.ExportedProgram,
    persistent: Mapping[str, str],
    *,
    quantization: Quantization | None = None,
    finish: Callable[[fx.Graph], None] = lambda _: None,
) -> PartitionedStep:
    """Partitions an exported step.

    Args:
        exported: The step.
        persistent: The stored name of every tensor of a checkpoint (tied tensors share one). Other buffers are
            constants.
        quantization: How linear layers take packed weights; None: they take weights as stored.
        finish: Changes the graph of a piece, but not its inputs and outputs.
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
    partitioner = _Partitioner()
    module = split_module(graph_module, graph_module, partitioner, keep_original_order=True)
    pieces, outputs = _Assembly(module, bindings, markers, partitioner.places, finish).pieces()
    used = {name for piece in pieces for name in piece.inputs}
    used_weights = {name for binding in used for name in weight_names(binding)}
    return PartitionedStep(
        pieces=pieces,
        outputs=outputs,
        weights=tuple(spec for spec in weights if spec.name in used_weights),
        constants={name: value for name, value in constants.items() if f"const:{name}" in used},
    )


@dataclass(frozen=True)
class _Place:
    """Where a piece lies: in a layer, or outside of all before or after them. `label` is its unit's."""

    label: str
    layer: int | None
    num_before: int = 0
    """How many calls of `OWN_UNITS` its layer has before it, itself included."""


class _Partitioner:
    """Numbers the piece of each node."""

    def __init__(self) -> None:
        self._numbers: dict[_Place, int] = {}
        self._layer: int | None = None
        self._num_calls: Counter[int | None] = Counter()
        self._of_calls: dict[fx.Node, int] = {}

    def __call__(self, node: fx.Node) -> int:
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and source in self._of_calls:
            return self._of_calls[source]
        layer = layer_of(node)
        is_outside = layer is None
        self._layer = self._layer if is_outside else layer
        if node.target in OWN_UNITS:
            self._num_calls[layer] += 1
            label, _ = OWN_UNITS[node.target]
            number = self._of_calls[node] = self._number(_Place(label, layer, self._num_calls[layer]))
            return number
        if not is_outside:
            return self._number(_Place("layer", layer, self._num_calls[layer]))
        return self._number(_Place("embedding" if self._layer is None else "head", None))

    def _number(self, place: _Place) -> int:
        return self._numbers.setdefault(place, len(self._numbers))

    @property
    def places(self) -> tuple[_Place, ...]:
        """The place of each number, in the order in which pieces begin."""
        return tuple(self._numbers)


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


@dataclass(frozen=True)
class _TracedPiece:
    """A piece of a traced layer, and the names that its inputs had before the partition."""

    piece: Piece
    origins: tuple[str, ...]


class _Assembly:
    """Makes the pieces of a partitioned module, in order, and binds their inputs."""

    def __init__(
        self,
        module: fx.GraphModule,
        bindings: dict[str, str],
        markers: Mapping[int, Marker],
        places: Sequence[_Place],
        finish: Callable[[fx.Graph], None],
    ) -> None:
        self._finish = finish
        self._module, self._bindings, self._markers, self._places = module, bindings, markers, places
        self._names: dict[fx.Node, str] = {}
        self._pieces: list[Piece] = []
        self._layers: defaultdict[int, list[_TracedPiece]] = defaultdict(list)

    def pieces(self) -> tuple[tuple[Piece, ...], tuple[str, ...]]:
        """Returns the pieces, and the names of the step's outputs."""
        outputs: tuple[str, ...] = ()
        for node in self._module.graph.nodes:
            if node.op == "placeholder":
                self._names[node] = self._bindings[node.name]
            elif node.op == "call_module":
                self._pieces += self._pieces_of(node)
            elif node.op == "output":
                outputs = tuple(self._names[result].removeprefix("tmp:") for result in _results(node))
            elif node.op != "call_function":
                raise CompileError(f"a partitioned step has a node of kind {node.op!r}")
        return tuple(self._pieces), outputs

    def _pieces_of(self, node: fx.Node) -> list[Piece]:
        """Returns the piece of a submodule, or the pieces of the layer for which it has a marker."""
        graph, place = _subgraph(self._module, str(node.target)), self._place(node)
        names = dict(zip(_origins(graph), self._input_names(node), strict=True))
        if place.label in _LABELS_OF_UNITS:
            return [self._own_unit(node, graph, names, place)]
        order_by_need(graph)
        bound = {origin: names[origin] for origin in _origins(graph)}
        markers = [inner for inner in graph.nodes if inner.op == "call_function" and inner.target is MARKER]
        if markers:
            return self._reused(node, Marker.of(markers[0]), bound)
        outputs = self._name_outputs(node, [str(i) for i in range(len(_results(graph.output_node())))])
        self._finish(graph)
        return [self._kept(Piece(to_text(graph), tuple(bound.values()), outputs, place.label), place, bound)]

    def _place(self, node: fx.Node) -> _Place:
        return self._places[int(str(node.target).removeprefix("submod_"))]

    def _kept(self, piece: Piece, place: _Place, origins: Iterable[str]) -> Piece:
        if place.layer is not None:
            self._layers[place.layer].append(_TracedPiece(piece, tuple(origins)))
        return piece

    def _own_unit(self, node: fx.Node, graph: fx.Graph, names: Mapping[str, str], place: _Place) -> Piece:
        """Makes the piece of one call: its text is that of the unit, whatever the step's shapes are."""
        (call,) = [inner for inner in graph.nodes if inner.target in OWN_UNITS]
        taken = {result: str(result.args[1]) for result in graph.nodes if result.target is operator.getitem}
        self._name_outputs(node, [taken[result] for result in _results(graph.output_node())])
        origins = [argument.meta[_ORIGIN] for argument in call.args if isinstance(argument, fx.Node)]
        _, text_of = OWN_UNITS[call.target]
        outputs = tuple(f"{len(self._pieces)}.{i}" for i in range(len(call.meta["val"])))
        piece = Piece(text_of(call), tuple(names[origin] for origin in origins), outputs, place.label)
        return self._kept(piece, place, origins)

    def _reused(self, node: fx.Node, marker: Marker, bound: Mapping[str, str]) -> list[Piece]:
        """Makes a layer's pieces from the equal layer's, with the layer's arguments, weights and caches."""
        theirs = (node.meta[_ORIGIN] for node in self._markers[marker.original].arguments)
        mine = (bound[node.meta[_ORIGIN]] for node in marker.arguments)
        arguments = dict(zip(theirs, mine, strict=True))
        renamed: dict[str, str] = {}
        pieces: list[Piece] = []
        for traced in self._layers[marker.original]:
            number = len(self._pieces) + len(pieces)
            inputs = tuple(
                arguments.get(origin)
                or renamed.get(binding)
                or renumbered(binding, marker.original, marker.layer)
                for origin, binding in zip(traced.origins, traced.piece.inputs, strict=True)
            )
            outputs = tuple(f"{number}.{name.partition('.')[2]}" for name in traced.piece.outputs)
            renamed |= {
                f"tmp:{old}": f"tmp:{new}" for old, new in zip(traced.piece.outputs, outputs, strict=True)
            }
            pieces.append(replace(traced.piece, inputs=inputs, outputs=outputs))
        # Where the equal layer gives more, a full trace differs, and layers are not reused.
        self._names[node] = f"tmp:{pieces[-1].outputs[0]}"
        return pieces

    def _name_outputs(self, node: fx.Node, numbers: Sequence[str]) -> tuple[str, ...]:
        """Names what a submodule returns, in order. Returns the names."""
        outputs = tuple(f"{len(self._pieces)}.{number}" for number in numbers)
        (result,) = [
            inner for inner in _subgraph(self._module, str(node.target)).nodes if inner.op == "output"
        ]
        if isinstance(result.args[0], (tuple, list)):
            self._names.update({user: f"tmp:{outputs[user.args[1]]}" for user in node.users})  # type: ignore[index]
        else:
            self._names[node] = f"tmp:{outputs[0]}"
        return outputs

    def _input_names(self, node: fx.Node) -> Iterator[str]:
        for argument in node.args:
            if not isinstance(argument, fx.Node):
                raise CompileError(f"a piece takes {argument!r}, which is not a tensor")
            yield self._names[argument]


def _subgraph(partitioned: fx.GraphModule, name: str) -> fx.Graph:
    module = partitioned.get_submodule(name)
    if not isinstance(module, fx.GraphModule):
        raise CompileError(f"a partitioned step has a module {name!r} without a graph")
    return module.graph


def _results(node: fx.Node) -> tuple[fx.Node, ...]:
    results = node.args[0]
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)  # type: ignore[arg-type,return-value]


def _origins(graph: fx.Graph) -> tuple[str, ...]:
    return tuple(node.meta[_ORIGIN] for node in graph.nodes if node.op == "placeholder")
