"""Canonical text says what a graph computes and nothing else, and rebuilds it."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from aotgaudi.errors import CompileError
from aotgaudi.graphs.canonical import closed, from_text, is_open, order_by_need, to_text


class Mixed(nn.Module):
    """Uses every kind of argument that the text can hold."""

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        largest, where = x.max(dim=-1)
        masked = torch.where(x > 0.5, x, float("-inf"))
        picked = torch.cat([masked.to(torch.float64), x.double()], dim=0)[i]
        return picked, largest + where + torch.arange(3, device=x.device)


def graph_of(module: nn.Module, *args: torch.Tensor) -> fx.Graph:
    return torch.export.export(module, args, strict=False).graph_module.graph


def test_the_text_alone_rebuilds_the_graph() -> None:
    x, i = torch.rand(3, 4), torch.tensor([0, 5])

    text = to_text(graph_of(Mixed(), x, i))
    rebuilt, inputs = from_text(text)

    assert inputs == [("float32", [3, 4], [4, 1]), ("int64", [2], [1])]
    for got, want in zip(rebuilt(x, i), Mixed()(x, i), strict=True):
        assert torch.equal(got, want)


def test_the_text_of_a_rebuilt_graph_is_the_text() -> None:
    x, i = torch.rand(3, 4), torch.tensor([0, 5])
    text = to_text(graph_of(Mixed(), x, i))

    again = graph_of(from_text(text)[0], x, i)

    assert to_text(again) == text


def test_names_do_not_matter_and_numbers_do() -> None:
    class One(nn.Module):
        def forward(self, first: torch.Tensor) -> torch.Tensor:
            return first * 2.0 + 1

    class Other(nn.Module):
        def forward(self, another: torch.Tensor) -> torch.Tensor:
            doubled = another * 2.0
            return doubled + 1

    class Different(nn.Module):
        def forward(self, first: torch.Tensor) -> torch.Tensor:
            return first * 2.0 + 2

    x = torch.rand(2)
    assert to_text(graph_of(One(), x)) == to_text(graph_of(Other(), x))
    assert to_text(graph_of(One(), x)) != to_text(graph_of(Different(), x))
    assert to_text(graph_of(One(), x)) != to_text(graph_of(One(), torch.rand(3)))
    assert to_text(graph_of(One(), x)) != to_text(graph_of(One(), x.double()))


def test_strides_are_part_of_the_text() -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum(0)

    assert to_text(graph_of(Sum(), torch.rand(3, 3))) != to_text(graph_of(Sum(), torch.rand(3, 3).t()))


class Looked(nn.Module):
    """Reads and writes a cache whose second size is open."""

    def forward(self, cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        cache[:, blocks] = cache[:, blocks] * 2
        return cache[1].index_select(0, blocks)


def open_text(num_blocks: int) -> str:
    sizes = ({1: torch.export.Dim("blocks", min=2)}, None)
    args = (torch.zeros(2, num_blocks, 3), torch.tensor([0, 1]))
    return to_text(torch.export.export(Looked(), args, dynamic_shapes=sizes, strict=False).graph)


def test_an_open_size_is_the_same_text_whatever_it_was_traced_with() -> None:
    text = open_text(5)

    assert text == open_text(9)
    assert text.splitlines()[1] == '["input","float32",[2,"N",3],["3*N",3,1]]'
    rebuilt, (spec, _) = from_text(text)
    assert is_open(spec)
    assert (closed(spec[1], 7), closed(spec[2], 7)) == ([2, 7, 3], [21, 3, 1])
    for size in (2, 11):
        assert rebuilt(torch.zeros(2, size, 3), torch.tensor([1]))[0].shape == (1, 3)


def test_a_size_that_follows_from_an_open_one_is_refused() -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x[1:] + y

    size = torch.export.Dim("size", min=3, max=100)
    graph = torch.export.export(
        Sum(), (torch.zeros(6), torch.zeros(5)), dynamic_shapes=({0: size}, {0: size - 1}), strict=False
    ).graph

    with pytest.raises(CompileError, match="no canonical form"):
        to_text(graph)


def test_the_format_is_golden() -> None:
    class Line(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.where(x > 0, x, float("inf")).to(torch.bfloat16)

    assert to_text(graph_of(Line(), torch.rand(2, 3))) == (
        '"aotgaudi.graph/2"\n'
        '["input","float32",[2,3],[3,1]]\n'
        '["call","aten.gt.Scalar",[{"%":0},0],{}]\n'
        '["call","aten.where.ScalarOther",[{"%":1},{"%":0},{"float":"inf"}],{}]\n'
        '["call","aten.to.dtype",[{"%":2},{"dtype":"bfloat16"}],{}]\n'
        '["output",[{"%":3}]]\n'
    )


def test_a_second_open_size_is_refused() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x.sum() + y.sum()

    sizes = tuple({0: torch.export.Dim(name, min=2)} for name in "ab")
    graph = torch.export.export(
        Two(), (torch.zeros(5), torch.zeros(6)), dynamic_shapes=sizes, strict=False
    ).graph

    with pytest.raises(CompileError, match="no canonical form"):
        to_text(graph)


def test_another_version_is_refused() -> None:
    with pytest.raises(CompileError, match=r"aotgaudi.graph/9.*reads 'aotgaudi.graph/2'"):
        from_text('"aotgaudi.graph/9"\n["output",[]]\n')


def test_what_has_no_canonical_form_is_refused() -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(torch.ops.aten.full.default, ((2,), object())),))

    with pytest.raises(CompileError, match="no canonical form"):
        to_text(graph)


def two_branches(order: str) -> fx.Graph:
    """A graph of x, y and z, whose independent branches are traced in `order`. Its outputs need b's first."""
    graph = fx.Graph()
    inputs = {}
    for name in "xyz" if order == "ab" else "zyx":
        inputs[name] = graph.placeholder(name)
        inputs[name].meta["val"] = torch.zeros("xyz".index(name) + 2, 1)
    made = {}
    for name in order:
        source = inputs["x" if name == "a" else "y"]
        first = graph.call_function(torch.ops.aten.mul.Tensor, (source, 2.0 if name == "a" else 3.0))
        made[name] = graph.call_function(torch.ops.aten.add.Tensor, (first, inputs["z"]))
    graph.output((made["b"], made["a"]))
    return graph


def test_independent_branches_have_one_order_however_they_were_traced() -> None:
    one, other = two_branches("ab"), two_branches("ba")
    assert to_text(one) != to_text(other)

    order_by_need(one)
    order_by_need(other)

    assert to_text(one) == to_text(other)
    assert [node.name for node in one.nodes if node.op == "placeholder"] == ["y", "z", "x"]
    one.lint()
    x, y, z = torch.rand(3), torch.rand(3), torch.rand(3)
    got = fx.GraphModule(nn.Module(), one)(y, z, x)
    assert torch.equal(got[0], y * 3 + z)
    assert torch.equal(got[1], x * 2 + z)


def test_a_graph_that_writes_keeps_its_order() -> None:
    graph = fx.Graph()
    cache, value = graph.placeholder("cache"), graph.placeholder("value")
    before = graph.call_function(torch.ops.aten.mul.Tensor, (cache, 1.0))
    graph.call_function(torch.ops.aten.copy_.default, (cache, value))
    after = graph.call_function(torch.ops.aten.mul.Tensor, (cache, 1.0))
    graph.output((after, before))
    nodes = list(graph.nodes)

    order_by_need(graph)

    assert list(graph.nodes) == nodes
