"""One HTTP request's outputs, from the engine to the response. Everything here runs on the event loop.

Every `Generation` is closed in the end, and closing aborts the choices that still run. So when a client leaves, its KV
blocks are free after the current step.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from aotgaudi.engine.output import ErrorEvent, Event, TokenEvent
from aotgaudi.engine.request import NewRequest
from aotgaudi.engine.sampling_params import MAX_SEED, MIN_SEED, SamplingParams
from aotgaudi.errors import RequestError
from aotgaudi.server.engine.client import EngineClient
from aotgaudi.server.metrics import Metrics, OutputTimer
from aotgaudi.server.preprocess.prepare import PreparedRequest


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Token counts of one HTTP request, or of one of its choices.

    `num_cached_tokens` of the prompt came from the prefix cache. `num_thought_tokens` of the output are reasoning; None if
    reasoning is not looked for.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    num_thought_tokens: int | None = None


class Generation:
    """The outputs (choices) of one HTTP request: one or several for each prompt, ordered by prompt."""

    def __init__(
        self,
        engine: EngineClient,
        request_id: str,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self.request_id = request_id
        self._engine, self._metrics, self._clock = engine, metrics, clock
        self._arrival = clock()
        self.prompt_lens: tuple[int, ...] = ()
        self._arrived: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._timers: dict[int, OutputTimer] = {}
        self._is_closed = False
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._num_cached_tokens = 0
        self._num_choices, self._shows_output = 1, True

    @property
    def token_counts(self) -> TokenCounts:
        """Tokens so far, complete once `events` has ended. A prompt counts once, even if it has several choices."""
        return TokenCounts(self._num_prompt_tokens, self._num_output_tokens, self._num_cached_tokens)

    def submit(self, prepared: PreparedRequest) -> None:
        """Queues all choices or none. Those of one prompt get consecutive seeds, as in vLLM.

        Raises:
            RequestError: the engine refuses one of the choices. Names parameters as the body does.
        """
        each = [_with_seed(prepared.params, number) for number in range(prepared.num_choices)]
        choices = [(prompt, params) for prompt in prepared.prompts for params in each]
        requests = [
            NewRequest(self._id(index), prompt, params, prepared.cache_salt)
            for index, (prompt, params) in enumerate(choices)
        ]
        try:
            self._engine.add(requests, self._on_event)
        except RequestError as error:
            raise error.renamed(prepared.own_names) from error
        for index in range(len(requests)):
            self._timers[index] = OutputTimer(self._metrics, self._arrival, self._clock)
        self._num_choices, self._shows_output = prepared.num_choices, prepared.shows_output
        self.prompt_lens = tuple(len(prompt) for prompt, _ in choices)
        self._num_prompt_tokens = sum(map(len, prepared.prompts))
        self._metrics.prompt_tokens.inc(sum(self.prompt_lens))

    async def events(self) -> AsyncIterator[tuple[int, TokenEvent]]:
        """Yields new output with the index of its choice, as it comes, until all choices have ended.

        Raises:
            RequestError: 503; the server shuts down.
            Exception: the engine's error for one of the choices.
        """
        while self._timers:
            if not self._arrived:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            event = self._arrived.popleft()
            index = int(event.request_id.rpartition("-")[2])
            yield index, self._take(index, event)

    @property
    def must_wait(self) -> bool:
        """Whether `events` would have to wait for its next event."""
        return bool(self._timers) and not self._arrived

    def _on_event(self, event: Event) -> None:
        if self._is_closed:  # The client has left.
            return
        self._arrived.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Aborts the choices that still run, and ignores their events. Idempotent."""
        self._is_closed = True
        if self._timers:
            self._engine.abort(*map(self._id, self._timers))
            self._timers.clear()

    def _id(self, index: int) -> str:
        """Returns the engine's id of a choice, from which `events` reads the choice."""
        return f"{self.request_id}-{index}"

    def _take(self, index: int, event: Event) -> TokenEvent:
        timer = self._timers[index]
        if isinstance(event, ErrorEvent):
            del self._timers[index]
            raise event.error
        if not self._shows_output:
            event = _without_output(event)
        timer.count_tokens(len(event.token_ids))
        self._num_output_tokens += len(event.token_ids)
        if event.usage is not None and index % self._num_choices == 0:
            self._num_cached_tokens += event.usage.num_cached_tokens
        if event.finish_reason is not None:
            del self._timers[index]
        if event.finish_reason == "abort":
            raise RequestError("The server is shutting down", http_status=503)
        if event.finish_reason is not None:
            timer.finish(event.usage)
        return event


def _without_output(event: TokenEvent) -> TokenEvent:
    reason = event.finish_reason and ("abort" if event.finish_reason == "abort" else "length")
    return replace(event, text="", token_ids=(), logprobs=(), finish_reason=reason, stop_reason=None)


def _with_seed(params: SamplingParams, number: int) -> SamplingParams:
    """Returns the parameters of a prompt's choice `number`. If the request states a seed, each choice gets another."""
    if number == 0 or params.seed is None:
        return params
    seed = params.seed + number
    return replace(params, seed=seed if seed <= MAX_SEED else MIN_SEED + seed - MAX_SEED - 1)
