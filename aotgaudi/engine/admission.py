"""Which requests are admitted: a request that could never run is refused before it queues."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from aotgaudi.engine.blocks import num_blocks_for
from aotgaudi.engine.sampling_params import SamplingParams, shown
from aotgaudi.errors import RequestError
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.sampler import SamplerSpec
from aotgaudi.spec.sampler_signature import SamplerSignature, SamplerWork


@dataclass(frozen=True, slots=True)
class Admission:
    """The limits that a request must fit. Pure, any thread.

    Attributes:
        limits: What the scheduler may form.
        vocab_size: Prompts with token ids of `vocab_size` or more are refused; None checks only that ids are not
            negative.
        sampler: What the sampler was built for; requests that need more are refused.
        outside: Why the limits are lower than the model's, in words, which a refusal adds; empty where they are not.
    """

    limits: ServingLimits
    vocab_size: int | None = None
    sampler: SamplerSpec = SamplerSpec()  # noqa: RUF009 - a frozen value
    outside: str = ""

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> int:
        """Returns how many tokens the request may generate, at least 1.

        Raises:
            RequestError: 400; the request can never run. Names the parameter, the limit and the numbers.
        """
        check_token_ids(prompt_token_ids, self.vocab_size)
        try:
            check_sampling(params, self.sampler)
            return resolve_max_tokens(len(prompt_token_ids), params, self.limits)
        except RequestError as error:
            raise error.explained(self.outside if prompt_token_ids else "") from error


def resolve_max_tokens(num_prompt_tokens: int, params: SamplingParams, limits: ServingLimits) -> int:
    """Returns how many tokens the request may generate, at least 1. Pure, any thread.

    The last generated token is never stored in the cache, so a request with P prompt and G generated tokens takes the
    blocks of P + G - 1 tokens. A `max_tokens` of None is clipped to what fits; an explicit one is not.

    Raises:
        RequestError: The prompt is empty, or the request cannot fit; names the limit and the numbers.
    """
    if num_prompt_tokens == 0:
        raise RequestError("the prompt is empty: at least 1 token is needed", param="prompt")
    _check_prompt(num_prompt_tokens, limits)
    capacity = limits.num_blocks * limits.block_size
    if params.max_tokens is None:
        return min(limits.max_model_len - num_prompt_tokens, capacity + 1 - num_prompt_tokens)
    _check_total(num_prompt_tokens, params.max_tokens, limits)
    return params.max_tokens


def check_token_ids(token_ids: Sequence[int], vocab_size: int | None) -> None:
    """Raises RequestError unless every id is an integer in [0, `vocab_size`); None: no upper bound."""
    for token_id in token_ids:
        if not _is_token_id(token_id, vocab_size):
            bound = "" if vocab_size is None else f" below the vocabulary's size {vocab_size}"
            raise RequestError(f"token ids must be integers{bound}, not {shown(token_id)}", param="prompt")


def check_sampling(params: SamplingParams, sampler: SamplerSpec) -> None:
    """Refuses what the sampler was not built for, so that any mix of admitted requests has a warm graph.

    Raises:
        RequestError: 400; names the parameter, and the settings of the spec that would have to have it.
    """
    able = sampler.signature
    unmet = next(_unmet(params, able), None)
    if unmet is not None:
        param, field = unmet
        raise RequestError(
            f"This value of '{param}' is not supported by this server: no setting of sampler.settings in the "
            f"spec of its bundle has {field}",
            param=param,
        )
    if params.logprobs is not None and params.logprobs > sampler.num_logprobs:
        raise RequestError(
            f"logprobs must be at most {sampler.num_logprobs}, not {params.logprobs}: the largest num_logprobs of "
            "sampler.settings in the spec of this server's bundle",
            param="logprobs",
        )


def _unmet(params: SamplingParams, able: SamplerSignature) -> Iterator[tuple[str, str]]:
    """Yields the parameters that need more than `able`, and what a setting would need to have."""
    if params.signature.work > able.work:
        kinds = (
            ("temperature", SamplerWork.RANDOM, True, "a temperature above 0"),
            ("top_p", SamplerWork.FILTERED, params.top_p < 1, "top_p below 1 or top_k above 0"),
            ("top_k", SamplerWork.FILTERED, params.top_k > 0, "top_p below 1 or top_k above 0"),
            ("min_p", SamplerWork.MIN_P, params.min_p > 0, "min_p above 0"),
        )
        yield from ((param, field) for param, work, is_used, field in kinds if is_used and work > able.work)
    if params.signature.penalties and not able.penalties:
        neutral = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
        used = (param for param, value in neutral.items() if getattr(params, param) != value)
        yield from ((param, "a penalty") for param in used)
    if params.signature.logprobs and not able.logprobs:
        yield "logprobs", "num_logprobs above 0"


def _is_token_id(value: object, vocab_size: int | None) -> bool:
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return value >= 0 if vocab_size is None else 0 <= value < vocab_size


def _check_prompt(num_prompt_tokens: int, limits: ServingLimits) -> None:
    if num_prompt_tokens > limits.max_model_len - 1:
        raise RequestError(
            f"the prompt has {num_prompt_tokens} tokens; max_model_len = {limits.max_model_len} leaves room "
            f"for {limits.max_model_len - 1} and one generated token",
            param="prompt",
        )
    _check_blocks(f"the prompt has {num_prompt_tokens} tokens", num_prompt_tokens, limits, param="prompt")


def _check_total(num_prompt_tokens: int, max_tokens: int, limits: ServingLimits) -> None:
    total = num_prompt_tokens + max_tokens
    asked = f"{total} tokens were asked for ({num_prompt_tokens} in the prompt, max_tokens = {max_tokens})"
    if total > limits.max_model_len:
        raise RequestError(
            f"this model's maximum context length is max_model_len = {limits.max_model_len} tokens; {asked}",
            param="max_tokens",
        )
    _check_blocks(asked, total - 1, limits, param="max_tokens")


def _check_blocks(asked: str, num_tokens: int, limits: ServingLimits, *, param: str) -> None:
    num_blocks = num_blocks_for(num_tokens, limits.block_size)
    if num_blocks > limits.num_blocks:
        raise RequestError(
            f"{asked}, which takes {num_blocks} KV blocks of {limits.block_size} tokens; "
            f"the server has num_blocks = {limits.num_blocks}",
            param=param,
        )
