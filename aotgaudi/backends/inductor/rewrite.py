"""Rewrites a unit's graph before inductor compiles it, to call what is faster on the target. Offline only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from aotgaudi.backends.inductor.example_inputs import example_inputs
from aotgaudi.backends.inductor.levels import IsaLevel
from aotgaudi.backends.inductor.linear import reorder_weights
from aotgaudi.backends.inductor.prompt_attention import take_template
from aotgaudi.graphs.canonical import InputSpec


def rewrite(graph: fx.GraphModule, specs: list[InputSpec], level: IsaLevel) -> dict[int, str]:
    """Changes `graph`. Returns the layout of each reordered input, by its number."""
    values: Mapping[fx.Node, Tensor] = {}
    if level.has_bf16_alone:  # Other levels do not look at them.
        values = _values_of(graph, specs)
        take_template(graph.graph, values)
    layouts = reorder_weights(graph.graph, specs, level, values)
    graph.recompile()
    return layouts


class _Noted(fx.Interpreter):
    """Records each node's tensor."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.found: dict[fx.Node, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Records the node's tensor; part of fx's interpreter."""
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.found[n] = value
        return value


def _values_of(graph: fx.GraphModule, specs: list[InputSpec]) -> Mapping[fx.Node, Tensor]:
    """Returns a tensor without contents for each node."""
    noted = _Noted(graph)
    with FakeTensorMode() as mode, torch.no_grad():
        noted.run(*map(mode.from_tensor, example_inputs(specs, seed=0)))
    return noted.found
