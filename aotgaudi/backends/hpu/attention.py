"""How prompts attend on a card: by the bridge's fused attention, or written out.

A unit's text has an operator of ours in its place (`aotgaudi.graphs.attend_prompt`), so that texts do not follow the
bridge's signature, which grows from release to release. What is not known of it has a default, or is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor, fx

from aotgaudi.errors import CompileError
from aotgaudi.graphs.attend_prompt import ATTEND_PROMPT, attend_written_out, without_padding

Attention = Callable[..., Tensor]
"""Takes what the operator takes (`aotgaudi.graphs.attend_prompt`)."""


def attend_by(module: fx.GraphModule, attention: Attention) -> None:
    """Changes a unit's graph: its prompts attend by `attention`."""
    for node in module.graph.nodes:
        if node.target is ATTEND_PROMPT:
            node.target = attention
    module.recompile()


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
