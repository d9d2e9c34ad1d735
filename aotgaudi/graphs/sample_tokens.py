"""The operator that chooses a token a row. Devices compile it as they can; here is what it computes.

Legend of shape suffixes: b rows, V tokens of the vocabulary.
"""

from __future__ import annotations

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
    """Returns token ids [b] int64. A row of temperature 0 gets its likeliest token, the first of several.

    Others draw from ``exp((logit - largest) / temperature)``, of the tokens that every filter keeps:

    * ``top_k`` (0: all): logits no smaller than the k-th largest;
    * ``min_p`` (0: all): weights of at least so much, the largest being 1;
    * ``top_p`` (1: all): weights no smaller than the largest t for which weights of at least t make up the share `top_p` of
      what the other two filters keep.

    So tokens tied with the last one kept are kept. ``noise`` (float64, in [0, 1)) picks the first token whose cumulative
    weight, in the vocabulary's order and float64, exceeds the share `noise`. Where the largest logit is infinite or NaN,
    nothing can be drawn: the token is 0. A row's token does not depend on other rows. This is the reference: a unit has
    code of the device's own, whose weights may differ in their last bits.
    """
    scores_bV = logits_bV.float()
    top_b1 = scores_bV.amax(-1, keepdim=True)
    is_drawn_b = temperature_b > 0
    weights_bV = torch.exp((scores_bV - top_b1) / torch.where(is_drawn_b, temperature_b, 1.0)[:, None])
    if top_k_b is not None:
        weights_bV = torch.where(scores_bV >= _kth_largest(scores_bV, top_k_b), weights_bV, 0.0)
    if min_p_b is not None:
        weights_bV = torch.where(weights_bV >= min_p_b.clamp_max(1.0)[:, None], weights_bV, 0.0)
    if top_p_b is not None:
        least_b1 = torch.where(top_p_b[:, None] < 1, _nucleus(weights_bV, top_p_b), 0.0)
        weights_bV = torch.where(weights_bV >= least_b1, weights_bV, 0.0)
    cumulative_bV = weights_bV.double().cumsum(-1)
    tokens_b = (cumulative_bV <= noise_b[:, None] * cumulative_bV[:, -1:]).sum(-1)
    tokens_b = torch.where(top_b1[:, 0].isfinite(), tokens_b.clamp_max(logits_bV.shape[1] - 1), 0)
    return torch.where(is_drawn_b, tokens_b, scores_bV.argmax(-1))


@sample_tokens.register_fake
def _(logits_bV: Tensor, *_: object) -> Tensor:
    return logits_bV.new_empty(logits_bV.shape[:1], dtype=torch.int64)


def _kth_largest(scores_bV: Tensor, k_b: Tensor) -> Tensor:
    """Returns [b, 1]; the smallest where k is 0 or beyond the vocabulary."""
    size = scores_bV.shape[1]
    rank_b = torch.where(k_b > 0, k_b, size).clamp_max(size) - 1
    return scores_bV.sort(-1, descending=True).values.gather(1, rank_b[:, None])


def _nucleus(weights_bV: Tensor, share_b: Tensor) -> Tensor:
    """Returns [b, 1]: the largest t for which weights of at least t sum up to `share` of all."""
    sorted_bV = weights_bV.sort(-1, descending=True).values
    cumulative_bV = sorted_bV.double().cumsum(-1)
    num_before_b = (cumulative_bV < share_b[:, None] * cumulative_bV[:, -1:]).sum(-1)
    return sorted_bV.gather(1, num_before_b.clamp_max(weights_bV.shape[1] - 1)[:, None])


SAMPLE_TOKENS = torch.ops.aotgaudi.sample_tokens.default
