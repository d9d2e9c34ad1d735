"""From a graph to a callable on the card. Of this package, only this module names ``torch.compile`` and ``hpu_backend``.

Every process runs this front end, a server's too, before it is ready: recipes replace the graph compiler, and nothing else.
"""

from __future__ import annotations

import copy
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, fx

from aotgaudi.backends.hpu.attention import attend_by, attention_here
from aotgaudi.backends.hpu.card import DEVICE, Card, acquired_to_compile, put, without_grad
from aotgaudi.errors import CompileError, TargetError
from aotgaudi.gaudi.environment import COMPILE_OPTIONS

Run = Callable[[Sequence[Tensor]], list[Tensor]]


def compiled(graph: fx.GraphModule) -> Run:
    """Returns `graph` as the bridge compiles it when it is first run. Changes nothing in `graph`."""
    return without_grad(
        torch.compile(
            on_card(graph),
            backend="hpu_backend",
            fullgraph=True,
            dynamic=False,
            options=dict(COMPILE_OPTIONS),
        )
    )


def on_card(graph: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy that makes its tensors on the card (canonical texts name the CPU), and attends as the card does."""
    lowered = copy.deepcopy(graph)
    for node in lowered.graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": torch.device(DEVICE)}
    attend_by(lowered, attention_here())
    return lowered


@functools.cache
def require_stable_keys(card: Card) -> None:
    """Raises CompileError unless a graph has the same key after another graph. Compiles two small graphs."""
    first, _, again = (_keys(card, number) for number in (1, 2, 1))
    if first != again:
        raise CompileError(
            "the keys of this bridge's recipes do not repeat within a process, so no cache of it can be restored"
            " (aotgaudi doctor --hpu, H-06)"
        )


def _keys(card: Card, number: int) -> frozenset[str]:
    """Returns the keys that a small graph looks up; `number` says which graph."""
    before = card.counts()
    compiled(_small_graph(number))([put(torch.ones(4, 8)), put(torch.ones(8, 8))])
    found = card.counts().since(before).recipes
    if not found and card.counters.knows_recipes:
        raise CompileError("this bridge looks no recipe up for a graph of three operators")
    return found


def _small_graph(number: int) -> fx.GraphModule:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    result = graph.call_function(torch.ops.aten.mm.default, (x, w))
    for _ in range(number + 1):
        result = graph.call_function(torch.ops.aten.add.Tensor, (result, 0.5))
    graph.output((graph.call_function(torch.ops.aten.relu.default, (result,)),))
    return fx.GraphModule(torch.nn.Module(), graph)


def main() -> None:
    """Asks the card what `learn` wants to know, and writes it to the file ``argv[1]``."""
    try:
        card = acquired_to_compile()
        require_stable_keys(card)
        found = {"device_type": card.device_type, "synapse": card.synapse}
    except (CompileError, TargetError) as error:
        found = {"problem": str(error), "error": type(error).__name__}
    except ImportError as error:
        problem = f"target: the bridge cannot be imported: {error}"
        found = {"problem": problem, "error": TargetError.__name__}
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
