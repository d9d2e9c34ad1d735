"""Linear layers over weights in 8 bits: which become so, and what they compute."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from aotgaudi.graphs.program import rebound, weight_names
from aotgaudi.graphs.quantization import INT8
from aotgaudi.graphs.quantized_linear import INT8_LINEAR, quantize_linears

LINEAR = torch.ops.aten.linear.default
WIDTH = 4


class Step:
    """A graph of x [3, 4], to which layers are added; its bindings, and a tensor for each."""

    def __init__(self) -> None:
        self.graph, self.bindings, self.tensors = fx.Graph(), dict[str, str](), dict[str, Tensor]()
        self._generator = torch.Generator().manual_seed(0)
        self.x = self.placeholder("step:x", 3, WIDTH)
        self.results: list[fx.Node] = []

    def placeholder(self, binding: str, *shape: int) -> fx.Node:
        node = self.graph.placeholder(binding.replace(":", "_").replace(".", "_"))
        self.bindings[node.name] = binding
        node.meta["val"] = self.tensors[binding] = torch.randn(shape, generator=self._generator)
        return node

    def linear(self, weight: fx.Node, *bias: fx.Node, source: fx.Node | None = None) -> fx.Node:
        return self.call(LINEAR, source or self.x, weight, *bias)

    def call(self, target: torch._ops.OpOverload, *args: object) -> fx.Node:
        node = self.graph.call_function(target, args)
        self.results.append(node)
        return node

    def run(self) -> list[Tensor]:
        """Runs the graph, on weights as whoever loads a model makes them."""
        self.graph.lint()
        inputs = [
            self._input(self.bindings[node.name]) for node in self.graph.nodes if node.op == "placeholder"
        ]
        return list(fx.GraphModule(torch.nn.Module(), self.graph)(*inputs))

    def _input(self, binding: str) -> Tensor:
        source, _, name = binding.partition(":")
        if source not in INT8.sources:
            return self.tensors[binding]
        (name,) = weight_names(binding)
        packed = INT8.pack(self.tensors[f"weight:{name}"], name)
        return packed[INT8.sources.index(source)]

    def targets(self) -> list[object]:
        return [node.target for node in self.graph.nodes if node.op == "call_function"]


@given(has_bias=st.lists(st.booleans(), min_size=1, max_size=4), seed=st.integers(0, 9))
def test_every_layer_of_the_checkpoint_takes_integers_and_stays_near(has_bias: list[bool], seed: int) -> None:
    step = Step()
    for number, biased in enumerate(has_bias):
        bias = [step.placeholder(f"weight:{number}.bias", 5)] if biased else []
        step.linear(step.placeholder(f"weight:{number}", 5, WIDTH), *bias)
    step.graph.output(tuple(step.results))
    before = step.run()

    quantize_linears(step.graph, step.bindings, INT8)

    assert step.targets() == [INT8_LINEAR] * len(has_bias)
    for one, other in zip(step.run(), before, strict=True):
        assert (one - other).abs().max() < 0.05
        assert not torch.equal(one, other)


def test_a_tied_embedding_is_looked_up_as_it_is_stored() -> None:
    step = Step()
    table = step.placeholder("weight:embed", 7, WIDTH)
    step.linear(table)
    step.call(torch.ops.aten.mul.Tensor, table, 2.0)
    step.graph.output(tuple(step.results))

    quantize_linears(step.graph, step.bindings, INT8)

    bound = [step.bindings[node.name] for node in step.graph.nodes if node.op == "placeholder"]
    assert bound == ["step:x", rebound("int8", ["embed"]), "int8_scales:embed", "weight:embed"]
    assert torch.equal(step.run()[1], step.tensors["weight:embed"] * 2)


def test_what_is_no_checkpoints_stays_as_it_is() -> None:
    step = Step()
    step.linear(step.placeholder("const:w", 5, WIDTH))
    step.graph.output(tuple(step.results))

    quantize_linears(step.graph, step.bindings, INT8)

    assert step.targets() == [LINEAR]


def test_a_router_stays_as_it_is_and_what_follows_its_choice_does_not() -> None:
    step = Step()
    router = step.linear(step.placeholder("weight:router", 6, WIDTH))
    shares = step.call(torch.ops.aten.softmax.int, router, -1)
    chosen = step.call(torch.ops.aten.topk.default, shares, 2)
    step.results.remove(chosen)
    before = step.linear(step.placeholder("weight:before", WIDTH, WIDTH))
    step.linear(step.placeholder("weight:second", 6, WIDTH), source=before)
    step.graph.output(tuple(step.results))

    quantize_linears(step.graph, step.bindings, INT8)

    assert step.targets().count(LINEAR) == 1
    assert step.targets()[0] is LINEAR
    assert step.targets().count(INT8_LINEAR) == 2
