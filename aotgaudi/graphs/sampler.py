"""The sampler's graphs. Which of three graphs serves a batch is its signature; settings are per-row tensors.

Noise is an input, so that a seed reproduces: one uniform number a row, and the inverse of the cumulative
distribution. Filters need no sort: the smallest kept probability is found by searching the bit patterns of
the probabilities (non-negative floats order as their bits), three bits a round, exactly.

Top-k comes first and top-p is taken of what it leaves, as in transformers' warpers and vLLM. Tokens tied
with the last kept one are kept, so a result does not depend on the order of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from aotgaudi.graphs.sampler_signature import SamplerSignature

_BITS_A_ROUND = 3
_ROUNDS = 10
"""10 rounds of 3 bits: a probability is at most 1.0, whose bits are below 2**30."""


class SamplerGraph(nn.Module):
    """logits [b, V], temperature [b], top_p [b], top_k [b], noise [b] f64 -> token ids [b] int64."""

    def __init__(self, signature: SamplerSignature) -> None:
        super().__init__()
        self.signature = signature

    def forward(
        self, logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, noise: Tensor
    ) -> Tensor:
        """Samples one token a row; rows with temperature 0 are greedy."""
        greedy = logits.float().argmax(-1)
        if self.signature is SamplerSignature.GREEDY:
            return greedy
        scale = torch.where(temperature > 0, temperature, 1.0)
        probabilities = torch.softmax(logits.float() / scale[:, None], dim=-1)
        if self.signature is SamplerSignature.FILTERED:
            probabilities = _top_p(_top_k(probabilities, top_k), top_p)
        return torch.where(temperature > 0, _inverse_cdf(probabilities, noise), greedy)


def _top_k(p_bV: Tensor, k_b: Tensor) -> Tensor:
    """Zeroes what is smaller than the k-th largest probability; k = 0 keeps all."""
    wanted = torch.where(k_b > 0, k_b, p_bV.shape[1]).clamp_max(p_bV.shape[1])
    return _keep_largest(p_bV, torch.ones_like(p_bV), wanted.float())


def _top_p(p_bV: Tensor, top_p_b: Tensor) -> Tensor:
    """Keeps the largest probabilities until their sum reaches the share `top_p` of the row; 1 keeps all."""
    kept = _keep_largest(p_bV, p_bV, top_p_b * p_bV.sum(-1))
    return torch.where(top_p_b[:, None] < 1.0, kept, p_bV)


def _keep_largest(p_bV: Tensor, weight_bV: Tensor, wanted_b: Tensor) -> Tensor:
    """Zeroes every p below t: the largest t such that the weight of ``p >= t`` reaches `wanted`."""
    bits_bV = p_bV.view(torch.int32)
    threshold_b = torch.zeros_like(wanted_b, dtype=torch.int32)
    for round_ in reversed(range(_ROUNDS)):
        digits = torch.arange(1, 1 << _BITS_A_ROUND, dtype=torch.int32) << (_BITS_A_ROUND * round_)
        candidates_bd = threshold_b[:, None] + digits
        reached = torch.where(
            bits_bV[:, None, :] >= candidates_bd[..., None], weight_bV[:, None, :], 0.0
        ).sum(-1)
        count_b = (reached >= wanted_b[:, None]).sum(-1).to(torch.int32)
        threshold_b = threshold_b + (count_b << (_BITS_A_ROUND * round_))
    return torch.where(bits_bV >= threshold_b[:, None], p_bV, 0.0)


def _inverse_cdf(p_bV: Tensor, noise_b: Tensor) -> Tensor:
    """Returns the first token whose cumulative probability exceeds ``noise * total``, in float64.

    The clamp is for rounding at the very end of the noise: a token id is never out of the vocabulary.
    """
    cumulative = torch.cumsum(p_bV.double(), dim=-1)
    return (cumulative <= noise_b[:, None] * cumulative[:, -1:]).sum(-1).clamp_max(p_bV.shape[1] - 1)
