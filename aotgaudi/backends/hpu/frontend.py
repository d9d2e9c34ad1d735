"""From a graph to a callable on the card. The only module that names ``torch.compile`` and ``hpu_backend``.

Every process runs this front end, a server's too, before it is ready: recipes replace the graph compiler, and nothing else.

In bridges up to about 1.22 the key of a recipe holds a counter of FX's modules (K-07). Where it does, the counter is
pinned to a number that follows from the graph (K-09), and a first graph is compiled for what the front end counts once a
process.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast, get_args

import torch
from torch import Tensor, fx

from aotgaudi.backends.hpu.attention import attend_by, attention_here
from aotgaudi.backends.hpu.card import DEVICE, Card, acquired, put, without_grad
from aotgaudi.backends.hpu.learn import KeyMode
from aotgaudi.digest import sha256_bytes
from aotgaudi.errors import CompileError, TargetError

OPTIONS = MappingProxyType(
    {"use_eager_fallback": False, "keep_input_mutations": True, "use_graph_freezing": False}
)
"""Of the backend: an operator that is not lowered is an error (K-18), caches are written in place (K-21), and weights
are no constants (K-32)."""

_PIN_RANGE, _PIN_STEP = 10**9, 1000
"""A unit's front end makes far fewer modules than a step."""

Run = Callable[[Sequence[Tensor]], list[Tensor]]


def compiled(graph: fx.GraphModule, text: str, key_mode: KeyMode) -> Run:
    """Returns `graph`, whose canonical text is `text`, as the bridge compiles it when it is first run. Changes nothing."""
    lowered = on_card(graph)
    function = torch.compile(
        lowered, backend="hpu_backend", fullgraph=True, dynamic=False, options=dict(OPTIONS)
    )
    run = without_grad(function)
    if key_mode == "stable":
        return run
    first = 1 + int(sha256_bytes(text.encode())[:12], 16) % _PIN_RANGE * _PIN_STEP

    def pinned(inputs: Sequence[Tensor]) -> list[Tensor]:
        _pin(first)
        return run(inputs)

    return pinned


def on_card(graph: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy that makes its tensors on the card (canonical texts name the CPU), and attends as the card does."""
    lowered = copy.deepcopy(graph)
    for node in lowered.graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": torch.device(DEVICE)}
    attend_by(lowered, attention_here())
    return lowered


def find_key_mode(card: Card) -> KeyMode:
    """Returns how the keys of recipes repeat with this bridge. Compiles a few small graphs.

    Raises CompileError where they do not.
    """
    for mode in get_args(KeyMode):
        _keys(card, 0, mode)
        first = _keys(card, 1, mode)
        _keys(card, 2, mode)
        if first == _keys(card, 1, mode):
            return cast("KeyMode", mode)
    raise CompileError(
        "the keys of this bridge's recipes do not repeat within a process, so no cache of it can be restored"
        " (aotgaudi doctor --hpu, H-06)"
    )


def _keys(card: Card, number: int, mode: Any) -> frozenset[str]:
    """The keys that a small graph looks up; `number` says which graph."""
    before, graph = card.counts(), _small_graph(number)
    compiled(graph, f"small graph {number}", mode)([put(torch.ones(4, 8)), put(torch.ones(8, 8))])
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


def _pin(number: int) -> None:
    torch.fx.graph_module._loader.next_id = number


def main() -> None:
    """Asks the card what `learn` wants to know, and writes it to the file RESULT."""
    try:
        card = acquired()
        found: dict[str, Any] = {
            "device_type": card.device_type,
            "synapse": card.synapse,
            "key_mode": find_key_mode(card),
        }
    except (TargetError, CompileError) as error:
        found = {"problem": str(error), "is_unstable": isinstance(error, CompileError)}
    except ImportError as error:
        found = {"problem": f"target: the bridge cannot be imported: {error}", "is_unstable": False}
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
