"""The sampler's graphs. Which one serves a batch is its signature; the values of settings are per-row tensors.

Noise is an input, so that a seed reproduces: one uniform number a row, and the inverse of the cumulative
distribution. Filters need no sort: the smallest kept probability is found by searching the bit patterns of
the probabilities (non-negative floats order as their bits), three bits a round, exactly.

The order is vLLM's (vllm/v1/sample/sampler.py): log-probabilities are those of the logits as they come;
penalties change the logits, also of greedy rows; then temperature, min-p, top-k, and top-p of what that leaves.
Tokens tied with the last kept one are kept, so a result does not depend on the order of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Union

import torch
from torch import Tensor, nn

from aotgaudi.graphs.step_inputs import sampler_inputs
from aotgaudi.spec.sampler_signature import SamplerSignature, SamplerWork

_BITS_A_ROUND = 3
_ROUNDS = 10
"""10 rounds of 3 bits: a probability is at most 1.0, whose bits are below 2**30."""


class SamplerGraph(nn.Module):
    """The inputs that graphs/step_inputs.py lists for `signature`, in order -> token ids [b] int64.

    With log-probabilities: ``(token ids, theirs [b], the `num_logprobs` likeliest [b, N], theirs [b, N])``.
    """

    def __init__(self, signature: SamplerSignature, num_logprobs: int = 0) -> None:
        super().__init__()
        self.signature, self.num_logprobs = signature, num_logprobs
        self.input_names = tuple(spec.name for spec in sampler_inputs(1, signature, 1, "float32"))

    @property
    def num_outputs(self) -> int:
        """How many tensors `forward` returns."""
        return 4 if self.signature.logprobs else 1

    def forward(self, *tensors: Tensor) -> Union[Tensor, tuple[Tensor, ...]]:
        """Samples one token a row; rows with temperature 0 are greedy."""
        x = dict(zip(self.input_names, tensors, strict=True))
        logits = _penalised(x) if self.signature.penalties else x["logits"]
        tokens = _sampled(logits, x, self.signature.work)
        return (
            (tokens, *_logprobs(x["logits"], tokens, self.num_logprobs))
            if self.signature.logprobs
            else tokens
        )


def _sampled(logits_bV: Tensor, x: Mapping[str, Tensor], work: SamplerWork) -> Tensor:
    greedy = logits_bV.float().argmax(-1)
    if work == SamplerWork.GREEDY:
        return greedy
    scale = torch.where(x["temperature"] > 0, x["temperature"], 1.0)
    p_bV = torch.softmax(logits_bV.float() / scale[:, None], dim=-1)
    if work >= SamplerWork.MIN_P:
        p_bV = _min_p(p_bV, x["min_p"])
    if work >= SamplerWork.FILTERED:
        p_bV = _top_p(_top_k(p_bV, x["top_k"]), x["top_p"])
    return torch.where(x["temperature"] > 0, _inverse_cdf(p_bV, x["noise"]), greedy)


def _penalised(x: Mapping[str, Tensor]) -> Tensor:
    """Makes tokens less likely that have occurred, as vLLM's apply_penalties does.

    A repetition penalty, of tokens in prompt or output, divides positive logits and multiplies negative ones;
    then the frequency penalty is subtracted once for each time that a token was generated, and the presence
    penalty once for those that were at all.
    """
    logits_bV, is_output_bV = x["logits"].float(), x["output_counts"] > 0
    repetition_b1 = x["repetition_penalty"][:, None]
    repeated_bV = torch.where(logits_bV > 0, logits_bV / repetition_b1, logits_bV * repetition_b1)
    logits_bV = torch.where(is_output_bV | x["prompt_mask"], repeated_bV, logits_bV)
    presence_bV = torch.where(is_output_bV, x["presence_penalty"][:, None], 0.0)
    return logits_bV - x["frequency_penalty"][:, None] * x["output_counts"] - presence_bV


def _logprobs(logits_bV: Tensor, tokens_b: Tensor, num_logprobs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probabilities under plain softmax: of `tokens`, and the likeliest tokens and theirs."""
    scores_bV = logits_bV.float()
    total_b1 = torch.logsumexp(scores_bV, dim=-1, keepdim=True)
    chosen_b1 = scores_bV.gather(1, tokens_b[:, None]) - total_b1
    top_bN, ids_bN = scores_bV.topk(min(num_logprobs, scores_bV.shape[1]), dim=-1)
    return chosen_b1[:, 0], ids_bN, top_bN - total_b1


def _min_p(p_bV: Tensor, min_p_b: Tensor) -> Tensor:
    """Zeroes what is less likely than the share `min_p` of the likeliest; 0 keeps all."""
    least_b1 = min_p_b.clamp_max(1.0)[:, None] * p_bV.amax(-1, keepdim=True)
    return torch.where(p_bV >= least_b1, p_bV, 0.0)


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
