"""Sampling over sorted tokens, in operators that Intel's bridge lowers, and in float32: the device has no float64 (K-20).

It keeps the tokens that `sample_tokens` keeps. Noise selects along them from the likeliest down, not in the vocabulary's
order, so a seed gives other tokens than on the CPU. The order makes up for the precision: whatever a sum of the device
rounds, no token is chosen that a filter has left out.

Legend of shape suffixes: b rows, V tokens of the vocabulary, the likeliest first.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from aotgaudi.graphs.sample_tokens import filtered

_LARGEST = 3.0e38
"""Larger logits count as infinite."""


def sample_sorted(
    logits_bV: Tensor,
    temperature_b: Tensor,
    noise_b: Tensor,
    top_k_b: Optional[Tensor],
    top_p_b: Optional[Tensor],
    min_p_b: Optional[Tensor],
) -> Tensor:
    """Returns token ids [b] int64, as `aotgaudi.graphs.sample_tokens.sample_tokens` does, with noise in float32."""
    scores_bV, ids_bV = logits_bV.float().sort(-1, descending=True)
    top_b1, is_sampled_b = scores_bV[:, :1], temperature_b > 0
    weights_bV = torch.exp((scores_bV - top_b1) / torch.where(is_sampled_b, temperature_b, 1.0)[:, None])
    weights_bV = filtered(
        weights_bV,
        scores_bV,
        top_k_b,
        top_p_b,
        min_p_b,
        ranked=lambda values_bV: values_bV,
        dtype=torch.float32,
    )
    tokens_b = _drawn(weights_bV, ids_bV, noise_b)
    tokens_b = torch.where(top_b1[:, 0].abs() < _LARGEST, tokens_b, 0)
    return torch.where(is_sampled_b, tokens_b, logits_bV.float().argmax(-1))


def _drawn(weights_bV: Tensor, ids_bV: Tensor, noise_b: Tensor) -> Tensor:
    """Returns [b]: the first token whose cumulative weight exceeds the share `noise`, one of those whose weight is not 0."""
    cumulative_bV = weights_bV.cumsum(-1)
    num_before_b1 = (cumulative_bV <= noise_b[:, None] * cumulative_bV[:, -1:]).sum(-1, keepdim=True)
    num_kept_b1 = (weights_bV > 0).sum(-1, keepdim=True).clamp_min(1)
    return ids_bV.gather(1, torch.minimum(num_before_b1, num_kept_b1 - 1))[:, 0]
