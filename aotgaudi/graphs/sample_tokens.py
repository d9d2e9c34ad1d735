"""The operator that samples a token for each row: its definition. Each device has its own code for it.

Legend of shape suffixes: b rows, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor


@torch.library.custom_op("aotgaudi::sample_tokens", mutates_args=())
def sample_tokens(
    logits_bV: Tensor,
    temperature_b: Tensor,
    noise_b: Tensor,
    top_k_b: Optional[Tensor],
    top_p_b: Optional[Tensor],
    min_p_b: Optional[Tensor],
) -> Tensor:
    """Returns token ids [b] int64. A row with temperature 0 gets its likeliest token, the first one if several tie.

    Other rows sample by the weights ``exp((logit - largest) / temperature)`` among the tokens that every filter keeps:

    * ``top_k`` (0 keeps all): logits no smaller than the k-th largest;
    * ``min_p`` (0 keeps all): weights of at least `min_p`, where the largest weight is 1;
    * ``top_p`` (1 keeps all): weights of at least t, for the largest t such that these weights are the share `top_p` of
      all weights that the other two filters keep.

    So tokens that tie with the last kept one are kept. ``noise`` (float64, in [0, 1)) selects the first token whose
    cumulative weight, in the vocabulary's order and in float64, exceeds the share `noise`. If the largest logit is infinite
    or NaN, the token is 0. A row's token does not depend on other rows. This is the reference: units run the device's code,
    whose weights may differ in the last bits.
    """
    scores_bV = logits_bV.float()
    top_b1 = scores_bV.amax(-1, keepdim=True)
    is_sampled_b = temperature_b > 0
    weights_bV = torch.exp((scores_bV - top_b1) / torch.where(is_sampled_b, temperature_b, 1.0)[:, None])
    weights_bV = filtered(
        weights_bV,
        scores_bV,
        top_k_b,
        top_p_b,
        min_p_b,
        ranked=lambda values_bV: values_bV.sort(-1, descending=True).values,
        dtype=torch.float64,
    )
    cumulative_bV = weights_bV.double().cumsum(-1)
    tokens_b = (cumulative_bV <= noise_b[:, None] * cumulative_bV[:, -1:]).sum(-1)
    tokens_b = torch.where(top_b1[:, 0].isfinite(), tokens_b.clamp_max(logits_bV.shape[1] - 1), 0)
    return torch.where(is_sampled_b, tokens_b, scores_bV.argmax(-1))


@sample_tokens.register_fake
def _(logits_bV: Tensor, *_: object) -> Tensor:
    return logits_bV.new_empty(logits_bV.shape[:1], dtype=torch.int64)


def filtered(
    weights_bV: Tensor,
    scores_bV: Tensor,
    top_k_b: Optional[Tensor],
    top_p_b: Optional[Tensor],
    min_p_b: Optional[Tensor],
    *,
    ranked: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """Returns the weights of the tokens that every filter keeps, and 0 for the others.

    `ranked` sorts rows, the largest first; sums are in `dtype`.
    """
    size = scores_bV.shape[1]
    if top_k_b is not None:
        rank_b = torch.where(top_k_b > 0, top_k_b, size).clamp_max(size) - 1
        kth_b1 = ranked(scores_bV).gather(1, rank_b[:, None])
        weights_bV = torch.where(scores_bV >= kth_b1, weights_bV, 0.0)
    if min_p_b is not None:
        weights_bV = torch.where(weights_bV >= min_p_b.clamp_max(1.0)[:, None], weights_bV, 0.0)
    if top_p_b is not None:
        sorted_bV = ranked(weights_bV)
        cumulative_bV = sorted_bV.to(dtype).cumsum(-1)
        num_before_b1 = (cumulative_bV < top_p_b[:, None] * cumulative_bV[:, -1:]).sum(-1, keepdim=True)
        least_b1 = sorted_bV.gather(1, num_before_b1.clamp_max(size - 1))
        least_b1 = torch.where(top_p_b[:, None] < 1, least_b1, 0.0)
        weights_bV = torch.where(weights_bV >= least_b1, weights_bV, 0.0)
    return weights_bV


SAMPLE_TOKENS = torch.ops.aotgaudi.sample_tokens.default
