"""D-21: fused attention. Rows beyond the lengths are 0: vllm-gaudi lets them reach blocks that every decode reads.

Heads that share keys and values (grouped queries) become a dimension, before the operator.

Source: ``FusedSDPA.py:60-200`` and ``eager_custom_op_register.cpp:2253`` of the bridge; arguments after the eleventh are
inferred from vllm-gaudi.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from habana_frameworks.bridge.faults import has_fault
from habana_frameworks.bridge.profile import PROFILE

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? attention_mask, float p, float scale, bool is_causal,"
    " bool requires_backward, str softmax_mode, Tensor? valid_seq_len, str seq_padding_type"
)

_LIBRARY = torch.library.Library("hpu", "DEF")
_LIBRARY.define(f"sdpa_recomp_fwd({_ARGUMENTS}{PROFILE.sdpa_tail}) -> (Tensor, Tensor, Tensor, Tensor)")


class FusedSDPA(torch.autograd.Function):
    """Attention without a backward: nothing here trains."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute_mode: bool | None = None,
        valid_seq_len: torch.Tensor | None = None,
        seq_padding_type: str = "left",
        return_dropout_mask: bool = False,
        return_attn_probs: bool = False,
        *tail: Any,
    ) -> torch.Tensor:
        """Returns what the heads of `q` see. `tail`: as the release has it, a window and sinks."""
        del ctx, recompute_mode
        if return_dropout_mask or return_attn_probs:
            raise NotImplementedError(
                "the double's fused attention gives neither dropout masks nor probabilities"
            )
        is_grouped = is_gqa(q, k)
        if is_grouped:
            q, k, v, attn_mask = gqa_input_reshape_fwd(q, k, v, attn_mask)
        how = (softmax_mode.lower(), valid_seq_len, seq_padding_type.lower(), *tail)
        scale = scale or 1 / math.sqrt(q.shape[-1])
        found = torch.ops.hpu.sdpa_recomp_fwd(q, k, v, attn_mask, dropout_p, scale, is_causal, False, *how)[0]
        return gqa_output_reshape(found) if is_grouped else found


def is_gqa(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Returns whether several heads of `q` share one of `k`; where all share one, shapes broadcast."""
    return q.dim() == 4 and k.shape[1] not in (1, q.shape[1])


def gqa_input_reshape_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns the tensors with a dimension for the heads of a group, after that of the groups."""
    num_groups = k.shape[1]
    if attention_mask is not None:
        is_of_heads = attention_mask.shape[1] == q.shape[1]
        attention_mask = (
            attention_mask.unflatten(1, (num_groups, -1)) if is_of_heads else attention_mask.unsqueeze(1)
        )
    return q.unflatten(1, (num_groups, -1)), k.unsqueeze(2), v.unsqueeze(2), attention_mask


def gqa_output_reshape(tensor: torch.Tensor) -> torch.Tensor:
    """Returns `tensor` without the dimension that `gqa_input_reshape_fwd` adds."""
    return tensor.flatten(1, 2)


def _run(q, k, v, mask, p, scale, causal, backward, mode, lengths, side, *tail):  # type: ignore[no-untyped-def]
    del p, backward, mode, tail
    if lengths is not None and (mask is not None or not causal):
        raise RuntimeError("valid_seq_len is only supported with is_causal and without attention_mask")
    scores = torch.matmul(q, k.transpose(-2, -1)).float() * (scale or 1 / math.sqrt(q.shape[-1]))
    if mask is not None:
        scores = scores + mask
    num_q, num_k = scores.shape[-2:]
    if causal:
        scores = scores.masked_fill(~torch.ones(num_q, num_k, dtype=torch.bool).tril(), -1e30)
    if lengths is not None:
        places = torch.arange(num_k).view(*[1] * (scores.dim() - 1), num_k)
        seen = places < lengths.view(-1, *[1] * (scores.dim() - 1))
        scores = scores.masked_fill(~seen, -1e30)
    found = torch.matmul(scores.softmax(-1).to(v.dtype), v)
    if lengths is not None and side == "right":
        rows = torch.arange(num_q).view(*[1] * (found.dim() - 2), num_q, 1)
        found = found.masked_fill(rows >= lengths.view(-1, *[1] * (found.dim() - 1)), _beyond())
    nothing = found.new_empty(0)
    return found, nothing, nothing.clone(), nothing.clone()


def _beyond() -> float:
    return math.nan if has_fault("nan-rows") else 0.0


def _fake(q, k, v, *rest):  # type: ignore[no-untyped-def]
    del k, rest
    nothing = q.new_empty(0)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), nothing, nothing.clone(), nothing.clone()


_LIBRARY.impl("sdpa_recomp_fwd", _run, "CPU")
_LIBRARY.impl("sdpa_recomp_fwd", _fake, "Meta")
