"""Canonical text of a graph: what a unit *is*.

The text holds everything that decides what a graph computes, and nothing else: no node names, no source
lines, no weights. Equal graphs have equal text, whatever layer, bucket or model they come from. The text
alone rebuilds the graph, so a unit can be compiled anywhere.

Grammar, version 2 (one JSON value a line)::

    text    = header { input } { call } output
    header  = "aotgaudi.graph/2"
    input   = ["input", dtype, [size...], [stride...]]
    size    = integer | "N"
    stride  = integer | "<integer>*N"
    call    = ["call", target, [argument...], {name: argument}]
    output  = ["output", [argument...]]

Inputs and calls are numbered from 0 in order of their lines. A target is ``namespace.name.overload`` of
torch.ops, or ``getitem``. An argument is a JSON scalar, a list, or a tagged object: ``{"%": n}`` the value
of line n, ``{"dtype": name}``, ``{"device": name}``, ``{"layout": name}``, ``{"memory_format": name}``,
``{"float": "inf" | "-inf" | "nan"}``. Lists and tuples are the same. ``N`` is a size that the graph leaves open: the
number of a cache's blocks, at least 2, or of tokens, at least 1. A graph has at most one.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable
from typing import Any, Union

import torch
from torch import fx

from aotgaudi.errors import CompileError

GRAPH_HEADER = "aotgaudi.graph/2"

Size = Union[int, str]
"""A number, or the grammar's form of a size or stride with an open ``N``."""

InputSpec = tuple[str, list[Size], list[Size]]
"""dtype name, sizes, strides."""

OPEN_SIZE = "N"
"""How the grammar writes a size that a graph leaves open."""

_DROPPED = frozenset({"aten._assert_tensor_metadata.default"})
_TAGS: dict[type, str] = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}


def order_by_need(graph: fx.Graph) -> None:
    """Puts the nodes of `graph` in an order that follows from its outputs alone, inputs included. Changes `graph`.

    A model's code may compute independent values in any order, for example by walking a set, so two processes trace the same
    graph differently. Here each node stands where the outputs, from first to last, need it first. A graph that writes to its
    inputs keeps its order, since a write must not change places with a read.
    """
    if any(_writes(node) for node in graph.nodes):
        return
    output = graph.output_node()
    needed: dict[fx.Node, None] = {}
    ahead = [(output, iter(output.all_input_nodes))]
    while ahead:  # Depth first, without recursion: graphs are thousands of nodes deep.
        node, arguments = ahead[-1]
        argument = next((each for each in arguments if each not in needed), None)
        if argument is not None:
            ahead.append((argument, iter(argument.all_input_nodes)))
            continue
        ahead.pop()
        needed[node] = None
    del needed[output]
    rest = [node for node in graph.nodes if node not in needed and node is not output]
    ordered = [*needed, *rest]
    for node in sorted(ordered, key=lambda node: node.op != "placeholder"):
        output.prepend(node)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def to_text(graph: fx.Graph) -> str:
    """Returns the canonical text. Placeholders need ``meta["val"]``. Raises CompileError for a node without one."""
    numbers: dict[fx.Node, int] = {}
    symbols: set[Any] = set()
    lines: list[Any] = [GRAPH_HEADER]
    for node in graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            sizes = [[_size(size, symbols) for size in row] for row in (value.shape, value.stride())]
            lines.append(["input", _name(value.dtype), *sizes])
        elif node.op == "call_function":
            target = _target_name(node.target)
            if target in _DROPPED:
                continue
            kwargs = {k: _encode(v, numbers) for k, v in sorted(node.kwargs.items())}
            lines.append(["call", target, _encode(node.args, numbers), kwargs])
        elif node.op == "output":
            results = node.args[0] if isinstance(node.args[0], (tuple, list)) else (node.args[0],)
            lines.append(["output", _encode(results, numbers)])
            continue
        else:
            raise CompileError(
                f"a graph has a node of kind {node.op!r} ({node.target}); expected calls of torch operators"
            )
        numbers[node] = len(numbers)
    return "\n".join(json.dumps(line, separators=(",", ":"), allow_nan=False) for line in lines) + "\n"


def from_text(text: str) -> tuple[fx.GraphModule, list[InputSpec]]:
    """Rebuilds the graph. Returns it and, for each input, ``(dtype name, sizes, strides)``. Raises CompileError."""
    header, *lines = [json.loads(line) for line in text.splitlines()]
    if header != GRAPH_HEADER:
        raise CompileError(f"a unit's text starts with {header!r}; this version reads {GRAPH_HEADER!r}")
    graph, values, inputs = fx.Graph(), list[fx.Node](), list[InputSpec]()
    for line in lines:
        if line[0] == "input":
            values.append(graph.placeholder(f"input_{len(inputs)}"))
            inputs.append((line[1], line[2], line[3]))
        elif line[0] == "call":
            kwargs = {name: _decode(value, values) for name, value in line[3].items()}
            values.append(graph.call_function(_target(line[1]), tuple(_decode(line[2], values)), kwargs))
        else:
            graph.output(tuple(_decode(line[1], values)))
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph), inputs


def is_open(spec: InputSpec) -> bool:
    """Whether an input has a size that the graph leaves open."""
    return OPEN_SIZE in spec[1]


def closed(sizes: Iterable[Size], n: int) -> list[int]:
    """Returns sizes or strides with `n` for the open size."""
    return [_times(size, n) if isinstance(size, str) else size for size in sizes]


def _times(size: str, n: int) -> int:
    return math.prod(n if factor == OPEN_SIZE else int(factor) for factor in size.split("*"))


def _size(size: Any, symbols: set[Any]) -> Size:
    """Returns the form of a size or stride, and adds its symbol to `symbols`, those of the graph.

    Raises CompileError for a symbolic size that is not a multiple of the graph's only symbol.
    """
    if isinstance(size, int):
        return size
    factor, symbol = size.node.expr.as_coeff_Mul()
    symbols.add(symbol)
    if not symbol.is_Symbol or len(symbols) > 1:
        raise CompileError(f"an input has the size {size}, which has no canonical form")
    return OPEN_SIZE if factor == 1 else f"{int(factor)}*{OPEN_SIZE}"


def _target_name(target: Any) -> str:
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    raise CompileError(f"the graph calls {target}, which is not a torch operator")


def _target(name: str) -> Any:
    if name == "getitem":
        return operator.getitem
    namespace, operator_name, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), operator_name), overload)


def _name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _encode(value: Any, numbers: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return {"%": numbers[value]}
    if isinstance(value, (list, tuple)):
        return [_encode(item, numbers) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.device):
        return {"device": value.type}
    for kind, tag in _TAGS.items():
        if isinstance(value, kind):
            return {tag: _name(value)}
    raise CompileError(f"the graph holds a {type(value).__name__} ({value!r}), which has no canonical form")


def _decode(value: Any, values: list[fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decode(item, values) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "%":
        return values[content]
    if tag == "float":
        return float(content)
    return torch.device(content) if tag == "device" else getattr(torch, content)
