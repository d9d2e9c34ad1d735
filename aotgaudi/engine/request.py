"""A request and its states: WAITING -> RUNNING -> FINISHED, and back to WAITING if it is preempted.

===========  ==================================================  =======================
state        block_table                                         num_computed_tokens
===========  ==================================================  =======================
WAITING      empty                                               0
RUNNING      covers the prefilled tokens, grows by decoding      0..num_tokens - 1
FINISHED     empty                                               unchanged
===========  ==================================================  =======================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum
from random import Random
from typing import Literal

from aotgaudi.engine.constraints import Constraint
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.engine.steps import SamplingRow, Scoring, TokenHistory, TokenLogprobs

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class NewRequest:
    """One sequence to be generated. The caller chooses `request_id`. Only requests with equal `cache_salt` share prefixes.

    `max_tokens` is how many tokens admission lets the request generate; None before admission.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    cache_salt: str = ""
    max_tokens: int | None = None


class RequestState(Enum):
    """The state of a request."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One sequence being generated. Mutable, owned by the engine's thread, compared by identity.

    The i-th sampled token always uses the i-th draw of the request's own generator, so neither preemption nor the other
    requests of a batch change the result. Since thousands may wait, a request makes its generator (2.5 kB) on first use.

    Attributes:
        max_tokens: Most tokens to generate. Admission made sure that prompt and output fit.
        arrived_at: When it arrived, in seconds of the engine's clock. `started_at` (first step) and `last_token_at` (newest
            token) are on the same clock, and None until then.
        stop_token_id: The one of its `stop_token_ids` that ended it.
        queued_at: When it was queued, in seconds of steps.
        num_cached_tokens: Tokens of its prompt that the prefix cache had when it was first scheduled.
        block_keys: Keys of its full blocks, as far as they were computed.
        prompt_logprobs: Log-probabilities of its prompt's tokens from the second on, as far as known, if it asks for them.
        num_named_blocks: How many of its blocks the pool knows by key (aotgaudi/engine/blocks.py).
        constraint: The tokens that it may get. Set before it is queued.
    """

    request_id: str
    prompt_token_ids: InitVar[Sequence[int]]
    params: SamplingParams
    max_tokens: int
    seed: int
    arrived_at: float = 0.0
    cache_salt: str = ""
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = field(default=None, init=False)
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_prefill_tokens: int = field(default=0, init=False)
    num_preemptions: int = field(default=0, init=False)
    last_decode: int = field(default=0, init=False)
    block_table: list[int] = field(default_factory=list, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    queued_at: float = field(default=0.0, init=False)
    started_at: float | None = field(default=None, init=False)
    last_token_at: float | None = field(default=None, init=False)
    num_named_blocks: int = field(default=0, init=False)
    block_keys: list[bytes] = field(default_factory=list, init=False, repr=False)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list, init=False, repr=False)
    constraint: Constraint | None = field(default=None, init=False, repr=False)
    _generator: Random | None = field(default=None, init=False, repr=False)
    _noise: float | None = field(default=None, init=False, repr=False)
    _history: TokenHistory | None = field(default=None, init=False, repr=False)

    def __post_init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        if self.params.signature.penalties:
            self._history = TokenHistory(self.token_ids, self.num_prompt_tokens)

    @property
    def num_tokens(self) -> int:
        """How many tokens are known: the prompt's and those generated so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """How many tokens were generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def queue_seconds(self) -> float:
        """How long it waited for its first step; 0 before that step."""
        return 0.0 if self.started_at is None else max(0.0, self.started_at - self.arrived_at)

    @property
    def last_token_id(self) -> int:
        """The newest known token."""
        return self.token_ids[-1]

    @property
    def is_prefilled(self) -> bool:
        """Whether it runs and only its newest token is not in the cache, so that its next step is a decode."""
        return self.state is RequestState.RUNNING and self.num_computed_tokens >= self.num_prefill_tokens

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.state is RequestState.FINISHED

    @property
    def is_scored(self) -> bool:
        """Whether it has all log-probabilities of its prompt that it asks for."""
        return self.params.prompt_logprobs is None or len(self.prompt_logprobs) >= self.num_prompt_tokens - 1

    def scoring(self, start: int, end: int) -> Scoring | None:
        """Returns which tokens of the prompt a step that computes the tokens from `start` to `end` must still score."""
        if self.params.prompt_logprobs is None:
            return None
        first, last = len(self.prompt_logprobs), min(end, self.num_prompt_tokens - 1)
        if first >= last:
            return None
        return Scoring(
            first - start, tuple(self.token_ids[first + 1 : last + 1]), self.params.prompt_logprobs
        )

    @property
    def sampling(self) -> SamplingRow:
        """How the next token is sampled. The value stays the same until that token is appended."""
        noise = self._draw() if self._noise is None else self._noise
        return SamplingRow(self.params, noise, self._history, self.constraint)

    def admit(self, block_table: list[int], num_computed_tokens: int = 0) -> None:
        """WAITING -> RUNNING. The known tokens after the first `num_computed_tokens` will be prefilled into these blocks."""
        self._require(RequestState.WAITING)
        self.state, self.block_table = RequestState.RUNNING, block_table
        self.num_prefill_tokens, self.num_computed_tokens = self.num_tokens, num_computed_tokens

    def preempt(self) -> list[int]:
        """RUNNING -> WAITING. Keeps the tokens, gives up the blocks and returns them."""
        self._require(RequestState.RUNNING)
        self.state, self.num_computed_tokens = RequestState.WAITING, 0
        self.num_preemptions += 1
        return self._release()

    def finish(self, reason: FinishReason) -> list[int]:
        """WAITING or RUNNING -> FINISHED. Returns the blocks that it held."""
        self._require(RequestState.WAITING, RequestState.RUNNING)
        self.state, self.finish_reason = RequestState.FINISHED, reason
        return self._release()

    def append_token(self, token_id: int) -> None:
        """Appends a sampled token and draws the noise of the next one."""
        self._require(RequestState.RUNNING)
        if self._noise is None:
            self._draw()  # Every token takes one draw, whether it is used or not.
        self.token_ids.append(token_id)
        self._noise = None

    def _draw(self) -> float:
        self._generator = self._generator or Random(self.seed)  # noqa: S311 - sampling, not secrets
        self._noise = self._generator.random()
        return self._noise

    def _release(self) -> list[int]:
        blocks, self.block_table, self.num_named_blocks = self.block_table, [], 0
        return blocks

    def _require(self, *states: RequestState) -> None:
        if self.state not in states:
            raise RuntimeError(f"request {self.request_id!r} is {self.state.value}")
