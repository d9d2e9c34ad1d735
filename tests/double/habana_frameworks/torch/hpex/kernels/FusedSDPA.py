"""D-21: fused attention. Rows beyond the lengths are 0: vllm-gaudi lets them reach blocks that every decode reads.

Source: ``FusedSDPA.py:60-200`` and ``eager_custom_op_register.cpp:2253`` of the bridge; arguments after the eleventh are
inferred from vllm-gaudi.
"""

from __future__ import annotations

import math

import torch

from habana_frameworks.bridge.faults import has_fault
from habana_frameworks.bridge.profile import PROFILE

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? attention_mask, float p, float scale, bool is_causal,"
    " bool requires_backward, str softmax_mode, Tensor? valid_seq_len, str seq_padding_type"
)

_LIBRARY = torch.library.Library("hpu", "DEF")
_LIBRARY.define(f"sdpa_recomp_fwd({_ARGUMENTS}{PROFILE.sdpa_tail}) -> (Tensor, Tensor, Tensor, Tensor)")


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
