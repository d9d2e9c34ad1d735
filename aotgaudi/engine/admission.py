"""Admission: the one place that decides whether a request may enter, and why it is refused. No torch, no threads.

======  ==========================================================================================
status  the request
======  ==========================================================================================
400     can never run: it exceeds a limit of the model, the sampler or the server, or reuses an open id
429     does not fit now: too many requests, prompt tokens or body bytes are open
503     comes too late: the server drains, or its engine has died
======  ==========================================================================================

A request is admitted once, by the process that takes it: the API server, or a caller's with the Python `LLM`. The engine
checks nothing again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from aotgaudi.engine.blocks import num_blocks_for
from aotgaudi.engine.limits import SMALL_BODY_BYTES, UNLIMITED, AdmissionLimits
from aotgaudi.engine.sampling_params import SamplingParams, shown
from aotgaudi.errors import RequestError
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.sampler import SamplerSpec
from aotgaudi.spec.sampler_signature import PARAMETERS, SamplerSignature

if TYPE_CHECKING:  # The preprocessor pool imports this module too, and needs no requests of the engine.
    from aotgaudi.engine.output import OnEvent
    from aotgaudi.engine.request import NewRequest


@dataclass(frozen=True, slots=True)
class RequestRules:
    """The conditions that a request must meet to run at all. Pure; any thread may use it.

    Attributes:
        limits: The scheduler's limits.
        vocab_size: Token ids from `vocab_size` on are refused.
        sampler: What the sampler was built for. Requests that need more are refused.
        scores_prompts: Whether the model's graphs can compute log-probabilities of prompts.
    """

    limits: ServingLimits
    vocab_size: int
    sampler: SamplerSpec = SamplerSpec()  # noqa: RUF009 - a frozen value
    scores_prompts: bool = True

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> int:
        """Returns how many tokens the request may generate, at least 1.

        Raises:
            RequestError: 400. Names the parameter, the limit and the numbers.
        """
        check_token_ids(prompt_token_ids, self.vocab_size)
        check_token_ids(params.allowed_token_ids or (), self.vocab_size, "allowed_token_ids")
        check_token_ids(dict(params.logit_bias), self.vocab_size, "logit_bias")
        check_token_ids(params.stop_token_ids, self.vocab_size, "stop_token_ids")
        check_sampling(params, self.sampler)
        if params.prompt_logprobs is not None and not self.scores_prompts:
            raise RequestError(
                "This server cannot give log-probabilities of prompts: in the graphs of its model, the head takes more "
                "than the last layer's result",
                param="prompt_logprobs",
            )
        max_tokens = resolve_max_tokens(len(prompt_token_ids), params, self.limits)
        if params.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens must be at most {max_tokens}, not {params.min_tokens}: no more tokens fit after the prompt",
                param="min_tokens",
            )
        return max_tokens

    def resolve(self, requests: Sequence[NewRequest]) -> list[NewRequest]:
        """Returns `requests` with `max_tokens` set, ready for the engine. Raises RequestError (400), as `check`."""
        return [
            replace(request, max_tokens=self.check(request.prompt_token_ids, request.params))
            for request in requests
        ]


class Admission:
    """Knows the open requests and who gets their events, and refuses those that would exceed the limits. Not thread-safe.

    A request passes three stages: its body is held (`hold`), it is prepared (`preparing`), and its prompts wait and run
    (`enter` to `leave`). `num_refused` counts refusals with 429 by the resource that was short.
    """

    def __init__(self, rules: RequestRules, limits: AdmissionLimits = UNLIMITED) -> None:
        """Raises the limit of prompt tokens to `max_model_len`, so that an empty server admits every prompt that can run."""
        self.rules = rules
        self._limits = replace(
            limits, max_prompt_tokens=max(limits.max_prompt_tokens, rules.limits.max_model_len)
        )
        self._open: dict[str, tuple[int, OnEvent | None]] = {}
        self._num_preparing = self._num_tokens = self._num_body_bytes = 0
        self._num_refused = dict.fromkeys(("server_requests", "server_tokens", "body_bytes"), 0)
        self._closed_because = ""

    @property
    def num_refused(self) -> Mapping[str, int]:
        """How many requests were refused with 429, by the resource that was short."""
        return dict(self._num_refused)

    @property
    def num_open(self) -> int:
        """How many prompts wait or run."""
        return len(self._open)

    def __iter__(self) -> Iterator[str]:
        """Yields the ids of the open requests."""
        return iter(self._open)

    def __contains__(self, request_id: str) -> bool:
        """Whether the request is open."""
        return request_id in self._open

    def listener(self, request_id: str) -> OnEvent | None:
        """Returns what gets the events of an open request."""
        return self._open[request_id][1]

    def close(self, reason: str) -> None:
        """Admits nothing from now on. Refusals state the `reason` of the first call."""
        self._closed_because = self._closed_because or reason

    def hold(self, num_more: int, num_held: int) -> None:
        """Counts `num_more` bytes of a body of which `num_held` are held already. The caller must `release` all of them.

        Raises:
            RequestError: 429; the server holds as many bytes as it may.
        """
        is_small = num_held + num_more <= SMALL_BODY_BYTES
        if not is_small and self._num_body_bytes + num_more > self._limits.max_body_bytes:
            self._refuse("body_bytes", "The server holds as many bytes of requests as it can")
        self._num_body_bytes += num_more

    def release(self, num_bytes: int) -> None:
        """Uncounts bytes that `hold` has counted."""
        self._num_body_bytes -= num_bytes

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Counts one request while it is prepared and the number of its prompts is not known.

        Raises:
            RequestError: 503 if admission is closed; 429 if the server is full.
        """
        self._check_open()
        self._check_requests(1)
        self._num_preparing += 1
        try:
            yield
        finally:
            self._num_preparing -= 1

    def enter(self, requests: Sequence[NewRequest], on_event: OnEvent | None = None) -> None:
        """Admits all of `requests`, which meet the rules, or none. `leave` frees the room of each.

        `on_event` gets their events.

        Raises:
            RequestError: 400 if an id is in use or the requests would not fit an empty server; 503 if admission is closed;
                429 if they do not fit now.
        """
        self._check_open()
        self._check_ids(requests)
        num_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self._check_ever(len(requests), "answers (prompts times n)", self._limits.max_requests)
        self._check_ever(num_tokens, "prompt tokens", self._limits.max_prompt_tokens)
        self._check_requests(len(requests))
        if self._num_tokens + num_tokens > self._limits.max_prompt_tokens:
            self._refuse_full(
                "server_tokens",
                f"{self._num_tokens} prompt tokens of {self._limits.max_prompt_tokens} wait or run",
            )
        self._open.update(
            (request.request_id, (len(request.prompt_token_ids), on_event)) for request in requests
        )
        self._num_tokens += num_tokens

    def leave(self, request_id: str) -> None:
        """Frees the room of a request that has ended."""
        self._num_tokens -= self._open.pop(request_id)[0]

    def _check_open(self) -> None:
        if self._closed_because:
            raise RequestError(self._closed_because, http_status=503)

    def _check_ids(self, requests: Sequence[NewRequest]) -> None:
        seen: set[str] = set()
        for request in requests:
            if request.request_id in self._open or request.request_id in seen:
                raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
            seen.add(request.request_id)

    def _check_ever(self, amount: int, what: str, limit: int) -> None:
        if amount > limit:
            raise RequestError(
                f"{amount} {what} are more than the {limit} that this server takes at once", param="prompt"
            )

    def _check_requests(self, num_more: int) -> None:
        num_taken = len(self._open) + self._num_preparing
        if num_taken + num_more > self._limits.max_requests:
            self._refuse_full(
                "server_requests", f"{num_taken} prompts of {self._limits.max_requests} wait or run"
            )

    def _refuse_full(self, reason: str, how: str) -> NoReturn:
        self._refuse(reason, f"the server is full: {how}; try again later")

    def _refuse(self, reason: str, message: str) -> NoReturn:
        self._num_refused[reason] += 1
        raise RequestError(message, http_status=429)


def resolve_max_tokens(num_prompt_tokens: int, params: SamplingParams, limits: ServingLimits) -> int:
    """Returns how many tokens the request may generate, at least 1. Pure; any thread may call it.

    The cache never holds the last generated token, so P prompt tokens and G generated tokens need the blocks of P + G - 1
    tokens. None as `max_tokens` stands for as many as fit. A number that does not fit is refused.

    Raises:
        RequestError: The prompt is empty, or the request cannot fit. Names the limit and the numbers.
    """
    if num_prompt_tokens == 0:
        raise RequestError("the prompt is empty: at least 1 token is needed", param="prompt")
    if num_prompt_tokens > limits.max_model_len - 1:
        raise RequestError(
            f"the prompt has {num_prompt_tokens} tokens; max_model_len = {limits.max_model_len} leaves room "
            f"for {limits.max_model_len - 1} and one generated token",
            param="prompt",
        )
    _check_blocks(f"the prompt has {num_prompt_tokens} tokens", num_prompt_tokens, limits, param="prompt")
    capacity = limits.num_blocks * limits.block_size
    if params.max_tokens is None:
        return min(limits.max_model_len - num_prompt_tokens, capacity + 1 - num_prompt_tokens)
    _check_total(num_prompt_tokens, params.max_tokens, limits)
    return params.max_tokens


def check_token_ids(token_ids: Iterable[object], vocab_size: int, param: str = "prompt") -> None:
    """Raises RequestError unless every id is an integer in [0, `vocab_size`)."""
    for token_id in token_ids:
        is_id = isinstance(token_id, int) and not isinstance(token_id, bool) and 0 <= token_id < vocab_size
        if not is_id:
            raise RequestError(
                f"token ids must be integers below the vocabulary's size {vocab_size}, not {shown(token_id)}",
                param=param,
            )


def check_sampling(params: SamplingParams, sampler: SamplerSpec) -> None:
    """Refuses parameters that the sampler was not built for, so that any mix of admitted requests has a warm graph.

    Raises:
        RequestError: 400. Names the parameter and the settings of the spec that would allow it.
    """
    able = sampler.signature
    serves = able.serves(params.signature) and (params.prompt_logprobs is None or able.logprobs)
    unmet = None if serves else next(_unmet(params, able), None)
    if unmet is not None:
        param, field = unmet
        raise RequestError(
            f"This value of '{param}' is not supported by this server: no setting of sampler.settings in the "
            f"spec of its bundle has {field}",
            param=param,
        )
    for param in ("logprobs", "prompt_logprobs"):
        num = getattr(params, param)
        if num is not None and num > sampler.num_logprobs:
            raise RequestError(
                f"{param} must be at most {sampler.num_logprobs}, not {num}: the largest num_logprobs of "
                "sampler.settings in the spec of this server's bundle",
                param=param,
            )


_CONSTRAINTS = ("structured_outputs", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens")


def _unmet(params: SamplingParams, able: SamplerSignature) -> Iterator[tuple[str, str]]:
    """Yields each parameter that needs more than `able`, and what a setting of the spec must have to allow it."""
    needs = params.signature
    for name, declared in PARAMETERS.items():
        alone = SamplingParams(**{name: getattr(params, name)}).signature
        if able.work < alone.work <= needs.work or (alone.penalties and not able.penalties):
            yield name, declared.need
    for param in ("logprobs", "prompt_logprobs"):
        if getattr(params, param) is not None and not able.logprobs:
            yield param, "num_logprobs above 0"
    if needs.constraints and not able.constraints:
        yield next(filter(lambda name: getattr(params, name), _CONSTRAINTS)), "constraints = true"


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
