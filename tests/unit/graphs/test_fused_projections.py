"""Linear layers of one input become one: which do, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from aotgaudi.graphs.fused_projections import fuse_projections
from aotgaudi.graphs.program import weight_names

LINEAR = torch.ops.aten.linear.default
WIDTH = 4


@dataclass(frozen=True)
class Layer:
    """A linear layer of a graph: what it reads, how many outputs it has, where it lies, and what it is special in."""

    source: int
    outputs: int
    layer: int = 0
    has_bias: bool = False
    is_constant: bool = False
    """Its weight follows from the configuration, and is no checkpoint's."""
    is_tied: bool = False
    """Its weight is used elsewhere, too."""


def graph_of(layers: Sequence[Layer]) -> tuple[fx.Graph, dict[str, str], dict[str, Tensor]]:
    """Returns a graph with these layers, the bindings of its placeholders, and a tensor for each binding."""
    graph, bindings, tensors = fx.Graph(), dict[str, str](), dict[str, Tensor]()
    generator = torch.Generator().manual_seed(0)

    def placeholder(binding: str, *shape: int) -> fx.Node:
        node = graph.placeholder(binding.replace(":", "_").replace(".", "_"))
        bindings[node.name] = binding
        node.meta["val"] = tensors[binding] = torch.randn(shape, generator=generator)
        return node

    sources = [placeholder(f"step:x{number}", 3, WIDTH) for number in (0, 1)]
    weights = []
    for number, layer in enumerate(layers):
        kind = "const" if layer.is_constant else "weight"
        names = [placeholder(f"{kind}:w{number}.weight", layer.outputs, WIDTH)]
        if layer.has_bias:
            names.append(placeholder(f"weight:w{number}.bias", layer.outputs))
        weights.append(names)
    results = []
    for layer, names in zip(layers, weights, strict=True):
        node = graph.call_function(LINEAR, (sources[layer.source], *names))
        node.meta["val"] = LINEAR(*(argument.meta["val"] for argument in node.args))
        node.meta["nn_module_stack"] = {"": (f"model.layers.{layer.layer}.x", None)}
        results.append(node)
        if layer.is_tied:
            results.append(names[0])
    graph.output(tuple(results))
    return graph, bindings, tensors


def run(graph: fx.Graph, bindings: Mapping[str, str], tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Runs a graph; joined weights are joined as whoever loads a model does."""
    graph.lint()
    inputs = []
    for node in graph.nodes:
        if node.op == "placeholder":
            binding = bindings[node.name]
            parts = [tensors[f"weight:{name}"] for name in weight_names(binding)] or [tensors[binding]]
            inputs.append(torch.cat(parts))
            assert node.meta["val"].shape == inputs[-1].shape
    return list(fx.GraphModule(torch.nn.Module(), graph)(*inputs))


def joined_names(graph: fx.Graph, bindings: Mapping[str, str]) -> list[tuple[str, ...]]:
    placeholders = [bindings[node.name] for node in graph.nodes if node.op == "placeholder"]
    return [weight_names(binding) for binding in placeholders if len(weight_names(binding)) > 1]


LAYERS = st.builds(
    Layer,
    source=st.integers(0, 1),
    outputs=st.integers(1, 5),
    layer=st.integers(0, 1),
    has_bias=st.booleans(),
    is_constant=st.sampled_from([False, False, False, True]),
    is_tied=st.sampled_from([False, False, False, True]),
)


@given(st.lists(LAYERS, min_size=1, max_size=6))
def test_what_is_computed_stays_and_every_pair_that_may_be_joined_is(layers: list[Layer]) -> None:
    graph, bindings, tensors = graph_of(layers)
    before = run(graph, bindings, tensors)
    groups: dict[tuple[int, int, bool], list[str]] = {}
    for number, layer in enumerate(layers):
        if not (layer.is_constant or layer.is_tied):
            groups.setdefault((layer.source, layer.layer, layer.has_bias), []).append(f"w{number}.weight")

    fuse_projections(graph, bindings)

    for one, other in zip(run(graph, bindings, tensors), before, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    names = joined_names(graph, bindings)
    expected = {tuple(group) for group in groups.values() if len(group) > 1}
    assert {group for group in names if group[0].endswith("weight")} == expected
    assert sum(node.target is LINEAR for node in graph.nodes) == len(layers) - sum(
        len(group) - 1 for group in expected
    )


def test_a_bias_goes_with_its_weight() -> None:
    graph, bindings, _ = graph_of([Layer(0, 2, has_bias=True), Layer(0, 3, has_bias=True)])

    fuse_projections(graph, bindings)

    assert joined_names(graph, bindings) == [("w0.weight", "w1.weight"), ("w0.bias", "w1.bias")]
