"""Which attention becomes a call of our template."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aotgaudi.backends.inductor.levels import ISA_LEVELS, IsaLevel
from aotgaudi.backends.inductor.rewrite import rewrite
from aotgaudi.graphs.canonical import from_text

AVX2, AVX512, BF16, AMX = ISA_LEVELS.values()
TORCHS, OURS = "aten.scaled_dot_product_attention.default", "aotgaudi.prompt_attention.default"
MASK = {"%": 3}


def targets(
    level: IsaLevel,
    arguments: list[Any],
    *,
    dtype: str = "bfloat16",
    mask: tuple[str, list[int]] = ("bool", [2, 1, 8, 24]),
    **named: Any,
) -> list[str]:
    """The attention operators of a graph once it is rewritten: queries [2, 6, 8, 16], keys and values [2, 3, 24, 16]."""
    shapes = [(dtype, [2, 6, 8, 16]), (dtype, [2, 3, 24, 16]), (dtype, [2, 3, 24, 16]), mask]
    inputs = [["input", kind, shape, strides(shape)] for kind, shape in shapes]
    call = ["call", TORCHS, [{"%": 0}, {"%": 1}, {"%": 2}, *arguments], {"enable_gqa": True, **named}]
    lines = ["aotgaudi.graph/2", *inputs, call, ["output", [{"%": 4}]]]
    graph, specs = from_text("\n".join(map(json.dumps, lines)) + "\n")

    assert rewrite(graph, specs, level) == {}

    found = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return [target for target in found if target in (TORCHS, OURS)]


def strides(shape: list[int]) -> list[int]:
    found = [1]
    for size in reversed(shape[1:]):
        found.insert(0, found[0] * size)
    return found


@pytest.mark.parametrize("level", ISA_LEVELS.values(), ids=lambda level: level.name)
def test_the_template_is_for_products_of_bfloat16_without_tiles(level: IsaLevel) -> None:
    assert targets(level, [MASK], scale=0.25) == [OURS if level is BF16 else TORCHS]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([MASK], {}),
        ([], {"scale": 0.25}),
        ([None, 0.0, True], {"scale": 0.25}),
        ([MASK], {"scale": 0.25, "dtype": "float32"}),
        ([MASK], {"scale": 0.25, "mask": ("bfloat16", [2, 1, 8, 24])}),
        ([MASK], {"scale": 0.25, "mask": ("bool", [2, 6, 8, 24])}),
        ([MASK], {"scale": 0.25, "mask": ("bool", [8, 24])}),
    ],
    ids=[
        "no scale",
        "no mask",
        "causal",
        "float32",
        "what is added",
        "a mask of each head",
        "one mask for all rows",
    ],
)
def test_attention_of_another_kind_stays_as_it_is(arguments: list[Any], named: dict[str, Any]) -> None:
    assert targets(BF16, arguments, **named) == [TORCHS]
