"""Linear layers, and embeddings, over weights that are reordered for them: offline, where a unit is compiled.

A product of few rows costs what reading its weights costs, and as a checkpoint stores them they are read badly
(docs/benchmarks.md). A server loads a model once, so it reorders once (`InductorRuntime.prepare`), and the unit takes the
reordered weight as an input: artifacts still hold no weights. There are two layouts:

* `PANELS`, with AVX512_BF16: a template of ours, ``panels.h``, reads them as one stream, those in 8 bits as well.
  Embeddings take tables in panels too, so that one which is the head's weight as well is in memory once.
* `REORDERED`, with AVX-512 of any other kind: oneDNN, which chooses its instructions at run time (tiles, where there are
  some). Inductor knows such products for weights that are constants of the graph alone. Here its lowering is replaced,
  while a unit is compiled, by the node that it would end in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import ir, mkldnn_ir

from aotgaudi.backends.inductor import panels
from aotgaudi.backends.inductor.levels import IsaLevel
from aotgaudi.backends.inductor.panels import IN_PANELS, INT8_IN_PANELS, ROWS_OF_PANELS
from aotgaudi.backends.inductor.runtime import PANELS, REORDERED
from aotgaudi.graphs.canonical import InputSpec
from aotgaudi.graphs.int8_linear import INT8_LINEAR

_LINEAR, _EMBEDDING = torch.ops.aten.linear.default, torch.ops.aten.embedding.default
_PRODUCT = torch.ops.mkldnn._linear_pointwise


def reorder_weights(
    graph: fx.Graph, specs: list[InputSpec], level: IsaLevel, values: Mapping[fx.Node, Tensor]
) -> dict[int, str]:
    """Makes the linear layers of `graph` take reordered weights where that is faster. Changes `graph`.

    Returns the layout of each input that is not as its spec says, by its number. What decides is the text and the target.
    `values` are what nodes have, of no contents.
    """
    layouts: dict[int, str] = {}
    layout = _layout_for(level)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for number, (node, spec) in enumerate(zip(placeholders, specs, strict=True)):
        if layout is not None and _takes(layout, node, spec[0], values):
            layouts[number] = layout
            for user in list(node.users):
                _replace(graph, user, layout)
    return layouts


def _takes(layout: str, node: fx.Node, dtype: str, values: Mapping[fx.Node, Tensor]) -> bool:
    """Whether all that uses an input takes it in a layout."""
    if dtype == "int8":
        return layout == PANELS and _is_int8_alone(node, values)
    return dtype == "bfloat16" and (_is_weight_alone(node) or (layout == PANELS and _is_table_alone(node)))


def _layout_for(level: IsaLevel) -> str | None:
    if level.has_bf16_alone:
        return PANELS
    return REORDERED if level.simdlen >= 512 else None


def _is_weight_alone(node: fx.Node) -> bool:
    """Whether an input is the weight of linear layers, and nothing else."""
    return bool(node.users) and all(
        user.target is _LINEAR and user.args[1] is node and node not in (user.args[0], *user.args[2:])
        for user in node.users
    )


def _is_int8_alone(node: fx.Node, values: Mapping[fx.Node, Tensor]) -> bool:
    """Whether an input is the weight of linear layers in 8 bits over inputs in bfloat16, and nothing else."""
    return bool(node.users) and all(
        user.target is INT8_LINEAR and user.args[1] is node and values[user.args[0]].dtype is torch.bfloat16  # type: ignore[index]
        for user in node.users
    )


def _is_table_alone(node: fx.Node) -> bool:
    """Whether an input is the table of embeddings, and nothing else."""
    return bool(node.users) and all(
        user.target is _EMBEDDING and user.args[0] is node and user.args[1] is not node for user in node.users
    )


def _replace(graph: fx.Graph, node: fx.Node, layout: str) -> None:
    with graph.inserting_before(node):
        if node.target is INT8_LINEAR:
            product = graph.call_function(INT8_IN_PANELS, node.args)
        elif node.target is _EMBEDDING:
            product = graph.call_function(ROWS_OF_PANELS, node.args[:2])
        elif layout == PANELS:
            product = graph.call_function(IN_PANELS, _operands(node))
        else:
            product = graph.call_function(_PRODUCT.default, (*_operands(node), "none", [], ""))
    node.replace_all_uses_with(product)
    graph.erase_node(node)


def _operands(node: fx.Node) -> tuple[Any, ...]:
    """Input, weight and bias of a linear layer."""
    return (*node.args, None)[:3]


def _lower(x: Any, w: Any, b: Any, attr: str, scalars: list[Any], algorithm: str) -> Any:
    return ir.TensorBox.create(mkldnn_ir.LinearUnary.create(x, w, b, attr, scalars, algorithm))


def _lower_with_sum(x: Any, y: Any, w: Any, b: Any, attr: str) -> Any:
    """What inductor makes of a product to which something is added."""
    return ir.TensorBox.create(mkldnn_ir.LinearBinary.create(x, y, w, b, attr))


LOWERINGS = {_PRODUCT.default: _lower, _PRODUCT.binary: _lower_with_sum, **panels.LOWERINGS}
"""What inductor makes of such products."""
