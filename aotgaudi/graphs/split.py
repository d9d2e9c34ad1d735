"""Cuts an exported step at decoder-layer boundaries, and writes the program that puts it together again.

The cut needs no code per model: every node's ``nn_module_stack`` says which ``layers.N`` it comes from.
What comes before the first layer (embedding, rope, masks) is one piece, each layer is one, and what comes
after the last (final norm, head) is one. Equal layers have equal text, hence one unit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch.export.graph_signature import InputKind
from torch.fx.passes.split_module import split_module

from aotgaudi.errors import CompileError
from aotgaudi.graphs.canonical import to_text
from aotgaudi.graphs.program import TensorSpec

_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)(?:\.|$)")


@dataclass(frozen=True)
class Piece:
    """One piece of a step: its canonical text, the bindings of its inputs, and the names of its outputs."""

    text: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    label: str


@dataclass(frozen=True)
class SplitStep:
    """A step in pieces. `constants` are the tensors behind ``const`` bindings, by name."""

    pieces: tuple[Piece, ...]
    outputs: tuple[str, ...]
    weights: tuple[TensorSpec, ...]
    constants: dict[str, torch.Tensor]


def split_step(exported: torch.export.ExportedProgram, persistent: Mapping[str, str]) -> SplitStep:
    """Splits an exported step.

    `persistent` maps the name of every tensor that a checkpoint holds to the name that it holds it under
    (tied tensors share one); other buffers are constants.
    """
    graph_module = exported.graph_module
    bindings, weights, constants = _bindings(exported, persistent)
    graph_module.graph.eliminate_dead_code()
    split = split_module(graph_module, None, _Partitioner(), keep_original_order=True)
    pieces, outputs = _pieces(split, bindings)
    used = {name for piece in pieces for name in piece.inputs}
    return SplitStep(
        pieces=pieces,
        outputs=outputs,
        weights=tuple(spec for spec in weights if f"weight:{spec.name}" in used),
        constants={name: value for name, value in constants.items() if f"const:{name}" in used},
    )


class _Partitioner:
    """Names the piece of each node: 0 before the layers, 1 + N for layer N, -1 after the last."""

    def __init__(self) -> None:
        self._layer: int | None = None

    def __call__(self, node: fx.Node) -> int:
        for path, _ in (node.meta.get("nn_module_stack") or {}).values():
            if found := _LAYER.search(path):
                self._layer = int(found.group(1))
                return self._layer + 1
        return 0 if self._layer is None else -1


def _bindings(
    exported: torch.export.ExportedProgram, persistent: Mapping[str, str]
) -> tuple[dict[str, str], list[TensorSpec], dict[str, torch.Tensor]]:
    """Returns placeholder name -> binding, the weights, and the constant tensors."""
    bindings: dict[str, str] = {}
    weights: list[TensorSpec] = []
    constants: dict[str, torch.Tensor] = {}
    for spec in exported.graph_signature.input_specs:
        placeholder = spec.arg.name
        name = (spec.target or "").removeprefix("model.")
        if spec.kind is InputKind.USER_INPUT:
            bindings[placeholder] = _user_binding(placeholder)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and name in persistent:
            stored = persistent[name]
            bindings[placeholder] = f"weight:{stored}"
            tensor = exported.state_dict[spec.target]
            weights.append(TensorSpec(name=stored, shape=tuple(tensor.shape), dtype=str(tensor.dtype)[6:]))
        else:
            bindings[placeholder] = f"const:{name}"
            held = exported.constants if spec.target in exported.constants else exported.state_dict
            constants[name] = held[spec.target].detach().clone().contiguous()
    return bindings, weights, constants


def _user_binding(placeholder: str) -> str:
    """``caches_3`` is the cache of layer 3; ``inputs_positions`` is the step input ``positions``."""
    if placeholder.startswith("caches_"):
        return f"kv:{int(placeholder.removeprefix('caches_'))}"
    return f"step:{placeholder.removeprefix('inputs_')}"


def _pieces(split: fx.GraphModule, bindings: dict[str, str]) -> tuple[tuple[Piece, ...], tuple[str, ...]]:
    names: dict[fx.Node, str] = {}
    pieces: list[Piece] = []
    outputs: tuple[str, ...] = ()
    for node in split.graph.nodes:
        if node.op == "placeholder":
            names[node] = bindings[node.name]
        elif node.op == "call_module":
            pieces.append(_piece(split, node, names, len(pieces)))
        elif node.op == "output":
            results = node.args[0] if isinstance(node.args[0], (tuple, list)) else (node.args[0],)
            outputs = tuple(names[result].removeprefix("tmp:") for result in results)
        elif node.op != "call_function":
            raise CompileError(f"a split step has a node of kind {node.op!r}")
    return tuple(pieces), outputs


def _piece(split: fx.GraphModule, node: fx.Node, names: dict[fx.Node, str], index: int) -> Piece:
    graph = split.get_submodule(str(node.target)).graph
    (result,) = [n for n in graph.nodes if n.op == "output"]
    several = isinstance(result.args[0], (tuple, list))
    outputs = tuple(f"{index}.{i}" for i in range(len(result.args[0]) if several else 1))
    if several:
        for user in node.users:
            names[user] = f"tmp:{outputs[user.args[1]]}"
    else:
        names[node] = f"tmp:{outputs[0]}"
    return Piece(to_text(graph), tuple(_input_names(node, names)), outputs, _label(str(node.target)))


def _input_names(node: fx.Node, names: dict[fx.Node, str]) -> Iterator[str]:
    for argument in node.args:
        if not isinstance(argument, fx.Node):
            raise CompileError(f"a piece takes {argument!r}, which is not a tensor")
        yield names[argument]


def _label(target: str) -> str:
    part = target.removeprefix("submod_")
    return {"0": "embedding", "-1": "head", "neg_1": "head"}.get(part, "layer")
