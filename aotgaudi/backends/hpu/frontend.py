"""From a graph to a callable on the card. Of this package, only this module names ``torch.compile`` and ``hpu_backend``.

Every process runs this front end, a server's too, before it is ready: recipes replace the graph compiler, and nothing else.
It is torch.compile's, or the bridge's backend is called without Dynamo (K-06), which takes less time and leaves nothing
that could trace again.

In bridges up to about 1.22 the key of a recipe holds a counter of FX's modules (K-07). Where it does, the counter is
pinned to a number that follows from the graph (K-09), and a first graph is compiled for what the front end counts once a
process.
"""

from __future__ import annotations

import copy
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast, get_args

import torch
from torch import Tensor, fx

from aotgaudi.backends.base import Target
from aotgaudi.backends.hpu.attention import attend_by, attention_here
from aotgaudi.backends.hpu.card import DEVICE, Card, acquired_to_compile, one_line, put, without_grad
from aotgaudi.backends.hpu.learn import KeyMode
from aotgaudi.backends.hpu.probe import FRONT_END, KEY_MODE
from aotgaudi.digest import sha256_bytes
from aotgaudi.errors import AotGaudiError, CompileError, TargetError
from aotgaudi.spec.target import FrontEndKind

OPTIONS = MappingProxyType(
    {"use_eager_fallback": False, "keep_input_mutations": True, "use_graph_freezing": False}
)
"""Of the backend: an operator that is not lowered is an error (K-18), caches are written in place (K-21), and weights
are no constants (K-32)."""

_PIN_RANGE, _PIN_STEP = 10**9, 1000
"""A unit's front end makes far fewer modules than a step."""

Run = Callable[[Sequence[Tensor]], list[Tensor]]


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """How graphs get to the bridge, in every process that builds or serves them.

    Attributes:
        key_mode: How the keys of recipes repeat.
        kind: Through torch.compile, or by a call of the backend.
    """

    key_mode: KeyMode
    kind: FrontEndKind = "dynamo"

    @classmethod
    def of(cls, target: Target) -> FrontEnd:
        """Returns the front end that `target` was made for."""
        kind = target.flags.get(FRONT_END, "dynamo")
        return cls(cast("KeyMode", target.flags[KEY_MODE]), cast("FrontEndKind", kind))

    def compiled(self, graph: fx.GraphModule, text: str) -> Run:
        """Returns `graph`, whose canonical text is `text`, as the bridge compiles it when it is first run.

        Changes nothing in `graph`.
        """
        run = without_grad(self._function(on_card(graph)))
        if self.key_mode == "stable":
            return run
        first = 1 + int(sha256_bytes(text.encode())[:12], 16) % _PIN_RANGE * _PIN_STEP

        def pinned(inputs: Sequence[Tensor]) -> list[Tensor]:
            _pin(first)
            return run(inputs)

        return pinned

    def _function(self, lowered: fx.GraphModule) -> Callable[..., Any]:
        if self.kind == "direct":
            return _Direct(lowered)
        return torch.compile(
            lowered, backend="hpu_backend", fullgraph=True, dynamic=False, options=dict(OPTIONS)
        )


class _Direct:
    """Calls the backend when the first inputs are there, as torch.compile does, and never again."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self._graph = graph
        self._function: Callable[..., Any] | None = None

    def __call__(self, *inputs: Tensor) -> Any:
        if self._function is None:
            self._function = call_backend(self._graph, inputs, OPTIONS)
        return self._function(*inputs)


def call_backend(
    graph: fx.GraphModule, inputs: Sequence[Tensor], options: Mapping[str, object]
) -> Callable[..., Any]:
    """Returns `graph` as the bridge's backend compiles it for such `inputs`, tensors on the card, without Dynamo (K-06)."""
    backends = importlib.import_module("habana_frameworks.torch.dynamo.compile_backend.backends")
    return backends.hpu_backend(graph, list(inputs), options=dict(options))  # type: ignore[no-any-return]


def on_card(graph: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy that makes its tensors on the card (canonical texts name the CPU), and attends as the card does."""
    lowered = copy.deepcopy(graph)
    for node in lowered.graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": torch.device(DEVICE)}
    attend_by(lowered, attention_here())
    return lowered


def find_key_mode(card: Card, kind: FrontEndKind = "dynamo") -> KeyMode:
    """Returns how the keys of recipes repeat with this bridge. Compiles a few small graphs.

    Raises CompileError where they do not, and where the bridge does not have this front end.
    """
    for mode in get_args(KeyMode):
        front_end = FrontEnd(mode, kind)
        _keys(card, 0, front_end)
        first = _keys(card, 1, front_end)
        _keys(card, 2, front_end)
        if first == _keys(card, 1, front_end):
            return front_end.key_mode
    raise CompileError(
        "the keys of this bridge's recipes do not repeat within a process, so no cache of it can be restored"
        " (aotgaudi doctor --hpu, H-06)"
    )


def _keys(card: Card, number: int, front_end: FrontEnd) -> frozenset[str]:
    """The keys that a small graph looks up; `number` says which graph."""
    before, run = card.counts(), front_end.compiled(_small_graph(number), f"small graph {number}")
    try:
        run([put(torch.ones(4, 8)), put(torch.ones(8, 8))])
    except AotGaudiError:
        raise
    except Exception as error:  # The bridge's own errors have no common type.
        if front_end.kind == "dynamo":
            raise
        raise CompileError(
            f"target.frontend: is 'direct', and this bridge's backend cannot be called without Dynamo: {one_line(error)}"
            ' (target.frontend = "dynamo"; aotgaudi doctor --hpu, H-18)'
        ) from error
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
    """Asks the card what `learn` wants to know of the front end ``argv[2]``, and writes it to the file ``argv[1]``."""
    result, kind = sys.argv[1:]
    try:
        card = acquired_to_compile()
        found: dict[str, Any] = {
            "device_type": card.device_type,
            "synapse": card.synapse,
            "key_mode": find_key_mode(card, cast("FrontEndKind", kind)),
        }
    except (CompileError, TargetError) as error:
        found = {"problem": str(error), "error": type(error).__name__}
    except ImportError as error:
        problem = f"target: the bridge cannot be imported: {error}"
        found = {"problem": problem, "error": TargetError.__name__}
    Path(result).write_text(json.dumps(found), encoding="utf-8")
