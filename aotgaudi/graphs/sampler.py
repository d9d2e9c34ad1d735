"""The sampler's graphs. A batch's signature decides which graph serves it; settings are per-row tensors.

Noise is an input, one uniform number per row, so that a seed reproduces. One operator samples (`sample_tokens.py`).

The order is vLLM's (vllm/v1/sample/sampler.py): log-probabilities are those of the model's logits; biases and penalties
change the logits, of greedy rows as well; tokens that constraints forbid are left out; then come top-n-sigma, temperature,
min-p, top-k, and top-p of the tokens that are left. vLLM has no top-n-sigma; the place is llama.cpp's.
Tokens that tie with the last kept one are kept, so the choice does not depend on the order of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Union

import torch
from torch import Tensor, nn

from aotgaudi.graphs.sample_tokens import SAMPLE_TOKENS
from aotgaudi.graphs.step_inputs import sampler_inputs
from aotgaudi.spec.sampler_signature import SamplerSignature, SamplerWork


class SamplerGraph(nn.Module):
    """The inputs that graphs/step_inputs.py lists for `signature`, in order -> token ids [b] int64.

    With log-probabilities: ``(token ids, theirs [b], the `num_logprobs` likeliest [b, N], theirs [b, N])``.
    """

    def __init__(
        self,
        signature: SamplerSignature,
        num_logprobs: int = 0,
        choose: Callable[..., Tensor] = SAMPLE_TOKENS,
    ) -> None:
        """`choose` samples: it takes what `sample_tokens` takes."""
        super().__init__()
        self.signature, self.num_logprobs, self._choose = signature, num_logprobs, choose
        self.input_names = tuple(spec.name for spec in sampler_inputs(1, signature, 1, "float32"))

    @property
    def num_outputs(self) -> int:
        """How many tensors `forward` returns."""
        return 4 if self.signature.logprobs else 1

    def forward(self, *tensors: Tensor) -> Union[Tensor, tuple[Tensor, ...]]:
        """Samples one token per row; rows with temperature 0 are greedy."""
        x = dict(zip(self.input_names, tensors, strict=True))
        logits = x["logits"]
        if self.signature.constraints:
            logits = _biased(logits, x)
        if self.signature.penalties:
            logits = _penalised(logits, x)
        if self.signature.constraints:
            logits = _allowed(logits, x["token_mask"])
        tokens = self._sampled(logits, x)
        return (
            (tokens, *_logprobs(x["logits"], tokens, self.num_logprobs))
            if self.signature.logprobs
            else tokens
        )

    def _sampled(self, logits_bV: Tensor, x: Mapping[str, Tensor]) -> Tensor:
        if self.signature.work == SamplerWork.GREEDY:
            return logits_bV.float().argmax(-1)
        if "top_n_sigma" in x:
            logits_bV = _near_largest(logits_bV, x["top_n_sigma"])
        filters = map(x.get, ("top_k", "top_p", "min_p"))
        return self._choose(logits_bV, x["temperature"], x["noise"], *filters)


def _biased(logits_bV: Tensor, x: Mapping[str, Tensor]) -> Tensor:
    """Adds each bias to its token's logit; unused places add 0 to token 0."""
    return logits_bV.float().scatter_add(1, x["bias_token_ids"], x["biases"])


def _allowed(logits_bV: Tensor, mask_bW: Tensor) -> Tensor:
    """Makes tokens impossible whose bit is not set. Bit i of word w, the lowest first, is of token 32 w + i.

    Each word is compared with 32 bits: compiled, that takes a third of the time of shifting the word to each bit.
    """
    ones_32 = torch.full((32,), 1, dtype=torch.int32)
    bits_32 = torch.bitwise_left_shift(ones_32, torch.arange(32, dtype=torch.int32))
    bits_bV = torch.bitwise_and(mask_bW[:, :, None], bits_32).flatten(1)[:, : logits_bV.shape[1]]
    return torch.where(bits_bV != 0, logits_bV, -torch.inf)


def _penalised(logits_bV: Tensor, x: Mapping[str, Tensor]) -> Tensor:
    """Makes tokens that have occurred less likely, as vLLM's apply_penalties does.

    The repetition penalty divides positive logits and multiplies negative ones, for tokens of prompt or output. Then
    the frequency penalty is subtracted once for each time that a token was generated, and the presence penalty once
    for each token that was generated at all.
    """
    logits_bV, is_output_bV = logits_bV.float(), x["output_counts"] > 0
    repetition_b1 = x["repetition_penalty"][:, None]
    repeated_bV = torch.where(logits_bV > 0, logits_bV / repetition_b1, logits_bV * repetition_b1)
    logits_bV = torch.where(is_output_bV | x["prompt_mask"], repeated_bV, logits_bV)
    presence_bV = torch.where(is_output_bV, x["presence_penalty"][:, None], 0.0)
    return logits_bV - x["frequency_penalty"][:, None] * x["output_counts"] - presence_bV


def _near_largest(logits_bV: Tensor, num_sigmas_b: Tensor) -> Tensor:
    """Makes tokens impossible whose logit is less than ``largest - num_sigmas * sigma``; 0 changes nothing.

    `sigma` is the standard deviation (of a population) of a row's finite logits, without temperature.

    Source: top-n-sigma (Tang et al., 2024, arXiv:2411.07641). As in llama.cpp's ``llama_sampler_top_n_sigma_apply``, logits
    of -inf do not count.
    """
    scores_bV = logits_bV.float()
    is_finite_bV = scores_bV.abs() < torch.inf
    num_b1 = is_finite_bV.sum(-1, keepdim=True).clamp_min(1)
    mean_b1 = torch.where(is_finite_bV, scores_bV, 0.0).sum(-1, keepdim=True) / num_b1
    squares_bV = torch.where(is_finite_bV, (scores_bV - mean_b1) ** 2, 0.0)
    sigma_b1 = (squares_bV.sum(-1, keepdim=True) / num_b1).sqrt()
    least_b1 = scores_bV.amax(-1, keepdim=True) - num_sigmas_b[:, None] * sigma_b1
    least_b1 = torch.where(num_sigmas_b[:, None] > 0, least_b1, -torch.inf)
    return torch.where(scores_bV < least_b1, -torch.inf, scores_bV)  # NaN stays.


def _logprobs(logits_bV: Tensor, tokens_b: Tensor, num_logprobs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probabilities under plain softmax: of `tokens`, then the likeliest tokens, and theirs."""
    scores_bV = logits_bV.float()
    total_b1 = torch.logsumexp(scores_bV, dim=-1, keepdim=True)
    chosen_b1 = scores_bV.gather(1, tokens_b[:, None]) - total_b1
    top_bN, ids_bN = scores_bV.topk(min(num_logprobs, scores_bV.shape[1]), dim=-1)
    return chosen_b1[:, 0], ids_bN, top_bN - total_b1
