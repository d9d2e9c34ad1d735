"""Linear layers and embeddings take reordered weights: decided offline, when a unit is compiled.

A product of few rows costs what reading its weights costs, and the order of a checkpoint is a bad one to read
(docs/benchmarks.md). A server loads a model once, so it reorders the weights once (`InductorRuntime.prepare`), and the unit
takes the reordered weight as an input: artifacts still hold no weights. There are two layouts:

* `PACKED`, with AVX512_BF16 and no tiles: our template ``packed_linear.h`` reads the weights as one stream, integers of 8
  bits as well. Embeddings take packed tables too, so that a table which is also the head's weight is in memory once.
* `REORDERED`, with any other AVX-512: oneDNN's own order, for its products, which choose their instructions at run time
  (tiles, for example). Inductor knows such products only for weights that are constants of the graph. Its lowering is
  replaced, while a unit is compiled, by the node that it would end in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import ir, mkldnn_ir

from aotgaudi.backends.inductor.levels import IsaLevel
from aotgaudi.backends.inductor.packed_linear import PACKED_EMBEDDING, PACKED_LINEAR
from aotgaudi.backends.inductor.quantized_linear import PACKED_FORMS
from aotgaudi.backends.inductor.runtime import PACKED, REORDERED
from aotgaudi.graphs.canonical import InputSpec

_LINEAR, _EMBEDDING = torch.ops.aten.linear.default, torch.ops.aten.embedding.default
_PRODUCT = torch.ops.mkldnn._linear_pointwise


def reorder_weights(
    graph: fx.Graph, specs: list[InputSpec], level: IsaLevel, values: Mapping[fx.Node, Tensor]
) -> dict[int, str]:
    """Makes the linear layers of `graph` take reordered weights where that is faster. Changes `graph`.

    Returns the layout of each reordered input, by its number. The result follows from the text and the target alone.
    `values` has a tensor without contents for each node.
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
    """Whether every user of an input takes it in a layout."""
    if layout == PACKED and _is_quantized_weight(node, values):
        return True
    return dtype == "bfloat16" and (_is_weight(node) or (layout == PACKED and _is_table(node)))


def _layout_for(level: IsaLevel) -> str | None:
    if level.has_bf16_alone:
        return PACKED
    return REORDERED if level.simdlen >= 512 else None


def _is_weight(node: fx.Node) -> bool:
    """Whether an input is the weight of linear layers, and nothing else."""
    return bool(node.users) and all(
        user.target is _LINEAR and user.args[1] is node and node not in (user.args[0], *user.args[2:])
        for user in node.users
    )


def _is_quantized_weight(node: fx.Node, values: Mapping[fx.Node, Tensor]) -> bool:
    """Whether an input is the quantized weight of linear layers over bfloat16, and nothing else."""
    return bool(node.users) and all(
        user.target in PACKED_FORMS and user.args[1] is node and values[user.args[0]].dtype is torch.bfloat16  # type: ignore[index]
        for user in node.users
    )


def _is_table(node: fx.Node) -> bool:
    """Whether an input is the table of embeddings, and nothing else."""
    return bool(node.users) and all(
        user.target is _EMBEDDING and user.args[0] is node and user.args[1] is not node for user in node.users
    )


def _replace(graph: fx.Graph, node: fx.Node, layout: str) -> None:
    with graph.inserting_before(node):
        if node.target in PACKED_FORMS:
            product = graph.call_function(PACKED_FORMS[node.target], node.args)
        elif node.target is _EMBEDDING:
            product = graph.call_function(PACKED_EMBEDDING, node.args[:2])
        elif layout == PACKED:
            product = graph.call_function(PACKED_LINEAR, _operands(node))
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
    """Compiles a product to which something is added."""
    return ir.TensorBox.create(mkldnn_ir.LinearBinary.create(x, y, w, b, attr))


LOWERINGS = {_PRODUCT.default: _lower, _PRODUCT.binary: _lower_with_sum}
"""How inductor compiles oneDNN's products."""
