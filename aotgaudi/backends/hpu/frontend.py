"""From a graph to a callable on the card. Of this package, only this module names ``torch.compile`` and ``hpu_backend``.

Every process runs this front end, a server's too, before it is ready: recipes replace the graph compiler, and nothing else.

Prompts attend by the bridge's fused attention, or written out. A unit's text has an operator of ours in its place
(`aotgaudi.graphs.attend_prompt`), so that texts do not follow the bridge's signature, which grows from release to release.
What is not known of it has a default, or is refused.
"""

from __future__ import annotations

import copy
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor, fx

from aotgaudi.backends.hpu.card import DEVICE, Card, acquired_to_compile, put
from aotgaudi.errors import CompileError, TargetError
from aotgaudi.gaudi.environment import COMPILE_OPTIONS
from aotgaudi.graphs.attend_prompt import ATTEND_PROMPT, attend_written_out, without_padding

Run = Callable[[Sequence[Tensor]], list[Tensor]]
Attention = Callable[..., Tensor]
"""Takes what the operator takes (`aotgaudi.graphs.attend_prompt`)."""


def compiled(graph: fx.GraphModule) -> Run:
    """Returns `graph` as the bridge compiles it when it is first run, without gradients. Changes nothing in `graph`."""
    function = torch.compile(
        on_card(graph), backend="hpu_backend", fullgraph=True, dynamic=False, options=dict(COMPILE_OPTIONS)
    )

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return list(function(*inputs))

    return run


def on_card(graph: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy that makes its tensors on the card (canonical texts name the CPU), and attends as the card does."""
    lowered = copy.deepcopy(graph)
    attention = attention_here()
    for node in lowered.graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": torch.device(DEVICE)}
        if node.target is ATTEND_PROMPT:
            node.target = attention
    lowered.recompile()
    return lowered


def attention_here() -> Attention:
    """Returns the bridge's fused attention if it has one, else attention written out. The bridge must be loaded.

    Raises CompileError, with the operator's signature, for one that cannot be called.
    """
    namespace: Any = torch.ops.hpu
    operator = getattr(namespace, "sdpa_recomp_fwd", None)
    return attend_written_out if operator is None else fused_attention(operator.default)


_KNOWN = (
    *("q", "k", "v", "attention_mask", "p", "scale", "is_causal", "requires_backward"),
    *("softmax_mode", "valid_seq_len", "seq_padding_type"),
)
_LATER: dict[str, object] = {"window_size": None, "sinks": None}
"""Arguments of newer releases that may have no default, and the values that switch them off."""


def fused_attention(operator: Any) -> Attention:
    """Returns attention by ``hpu::sdpa_recomp_fwd``. Raises CompileError for a signature that we do not know.

    Query heads of one key are a dimension of their own. Lengths go only with causal attention without a mask. What is left
    beyond them is not told (K-43), and reaches nobody.
    """
    arguments = operator._schema.arguments
    names = tuple(argument.name for argument in arguments)
    unknown = [a.name for a in arguments[len(_KNOWN) :] if a.name not in _LATER and not a.has_default_value()]
    if names[: len(_KNOWN)] != _KNOWN or unknown:
        raise CompileError(
            f"fused attention has a signature that this version does not know: {operator._schema}"
        )
    rest = tuple(
        _LATER[a.name] for a in arguments[len(_KNOWN) :] if a.name in _LATER and not a.has_default_value()
    )

    def attend(
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        bias: Optional[Tensor],
        lengths: Optional[Tensor],
        scaling: float,
    ) -> Tensor:
        by_key = query.view(query.shape[0], keys.shape[1], -1, *query.shape[2:])
        is_causal = bias is None
        found: Tensor = operator(
            *(by_key, keys[:, :, None], values[:, :, None], None if bias is None else bias[:, :, None]),
            *(0.0, scaling, is_causal, False, "fast", lengths if is_causal else None, "right", *rest),
        )[0]
        out = found.flatten(1, 2)
        return without_padding(out, lengths) if is_causal else out

    return attend


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
