"""Which inputs of a unit are to be reordered, and what becomes of the graph."""

from __future__ import annotations

import json

import pytest
import torch

from aotgaudi.backends.inductor.levels import ISA_LEVELS
from aotgaudi.backends.inductor.probe import this_machine
from aotgaudi.backends.inductor.rewrite import rewrite
from aotgaudi.backends.inductor.runtime import PACKED, REORDERED, InductorRuntime
from aotgaudi.errors import TargetError
from aotgaudi.graphs.canonical import from_text

HEADER = "aotgaudi.graph/2"
AVX2, AVX512, BF16, AMX = ISA_LEVELS.values()


def text(*calls: list[object], dtype: str = "bfloat16") -> str:
    """A graph of x [2, 8], weights of 4 and 8 outputs, and these calls; its output is the last one's."""
    inputs = [["input", dtype, shape, [shape[1], 1]] for shape in ([2, 8], [4, 8], [8, 8])]
    lines = [HEADER, *inputs, *calls, ["output", [{"%": 2 + len(calls)}]]]
    return "\n".join(map(json.dumps, lines)) + "\n"


def linear(source: int, weight: int) -> list[object]:
    return ["call", "aten.linear.default", [{"%": source}, {"%": weight}], {}]


@pytest.mark.parametrize(
    ("level", "layout", "product"),
    [
        (AVX512, REORDERED, "mkldnn._linear_pointwise.default"),
        (BF16, PACKED, "aotgaudi.packed_linear.default"),
        (AMX, REORDERED, "mkldnn._linear_pointwise.default"),
    ],
)
def test_weights_of_linear_layers_are_reordered_and_nothing_else(level, layout: str, product: str) -> None:
    graph, specs = from_text(text(linear(0, 2), linear(3, 1)))

    assert rewrite(graph, specs, level) == {1: layout, 2: layout}

    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert targets == [product] * 2


def test_a_weight_that_something_else_reads_stays_as_it_is() -> None:
    twice = ["call", "aten.add.Tensor", [{"%": 2}, {"%": 2}], {}]
    graph, specs = from_text(text(twice, linear(0, 2)))

    assert rewrite(graph, specs, AVX512) == {}


def test_what_is_multiplied_by_itself_stays_as_it_is() -> None:
    graph, specs = from_text(text(linear(2, 2)))

    assert rewrite(graph, specs, AVX512) == {}


@pytest.mark.parametrize(("level", "dtype"), [(AVX2, "bfloat16"), (AVX512, "float32"), (BF16, "float32")])
def test_where_there_is_no_faster_product_nothing_changes(level, dtype: str) -> None:
    written = text(linear(0, 2), dtype=dtype)
    graph, specs = from_text(written)

    assert rewrite(graph, specs, level) == {}
    assert [node.target for node in graph.graph.nodes] == [
        n.target for n in from_text(written)[0].graph.nodes
    ]


@pytest.mark.parametrize(
    ("level", "dtype", "layouts"),
    [
        (BF16, "bfloat16", {1: PACKED}),
        (BF16, "float32", {}),
        (BF16, "float16", {}),
        (AVX512, "bfloat16", {}),
        (AMX, "bfloat16", {}),
    ],
)
def test_integers_are_packed_where_products_of_bfloat16_read_them(level, dtype: str, layouts) -> None:
    inputs = [["input", dtype, [2, 8], [8, 1]], ["input", "int8", [4, 8], [8, 1]]]
    scales = ["input", "float32", [4], [1]]
    call = ["call", "aotgaudi.int8_linear.default", [{"%": 0}, {"%": 1}, {"%": 2}, None], {}]
    lines = [HEADER, *inputs, scales, call, ["output", [{"%": 3}]]]
    graph, specs = from_text("\n".join(map(json.dumps, lines)) + "\n")

    assert rewrite(graph, specs, level) == layouts


def test_a_layout_of_another_version_is_refused() -> None:
    with pytest.raises(TargetError, match=r"layout 'later'"):
        InductorRuntime(this_machine()).prepare("later", torch.zeros(2, 2))
