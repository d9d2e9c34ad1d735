"""One HTTP request's outputs: from the engine's thread to the event loop.

::

    engine's thread    on_event -> loop.call_soon_threadsafe -> queue
    event loop         queue -> Generation.events() -> response

A `Generation` is always closed, and closing aborts what has not ended. So when a client goes away, its KV blocks are
free again after the step that runs now.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from aotgaudi.engine.core import EngineStats
from aotgaudi.engine.output import ErrorEvent, Event, OnEvent, TokenEvent
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.errors import RequestError
from aotgaudi.server.metrics import Metrics, OutputTimer

logger = logging.getLogger(__name__)


class EngineLike(Protocol):
    """What the server needs of an engine, such as `aotgaudi.engine.loop.Engine`. Every method: any thread."""

    @property
    def failure(self) -> Exception | None:
        """The error that ended the engine; None while it is well."""
        ...

    def add(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, *, request_id: str, on_event: OnEvent
    ) -> object:
        """Queues a request. `on_event` is called on the engine's thread. Raises RequestError."""
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request early. Ignores ids that are unknown or have ended."""
        ...

    def drain(self, timeout_seconds: float | None = None) -> bool:
        """Refuses new requests and waits for the others to end. Returns whether they have."""
        ...

    def shutdown(self, timeout_seconds: float | None = None) -> bool:
        """Aborts what still runs and ends the engine. Returns whether it has ended."""
        ...

    def stats(self) -> EngineStats:
        """Returns a snapshot of counters and gauges."""
        ...


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of one HTTP request, over all its choices."""

    num_prompt_tokens: int
    num_output_tokens: int


class Generation:
    """The outputs of one HTTP request, one per prompt. Made and used on the event loop."""

    def __init__(
        self,
        engine: EngineLike,
        request_id: str,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self.request_id = request_id
        self._engine, self._metrics, self._clock = engine, metrics, clock
        self._arrival = clock()
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._open: dict[int, OutputTimer] = {}
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0

    @property
    def token_counts(self) -> TokenCounts:
        """Tokens so far; complete once `events` has ended."""
        return TokenCounts(self._num_prompt_tokens, self._num_output_tokens)

    def submit(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        """Queues all `prompts`, or none.

        Raises:
            RequestError: the engine refuses one of them.
        """
        try:
            for index, prompt in enumerate(prompts):
                self._engine.add(
                    prompt, params, request_id=self._engine_id(index), on_event=self._on_event_of(index)
                )
                self._open[index] = OutputTimer(self._metrics, self._arrival, self._clock)
        except RequestError:
            self.close()
            raise
        self._num_prompt_tokens = sum(map(len, prompts))
        self._metrics.prompt_tokens.inc(self._num_prompt_tokens)

    async def events(self) -> AsyncIterator[tuple[int, TokenEvent]]:
        """Yields the new output of all choices as it comes, each with the choice's index, until all have ended.

        Raises:
            RequestError: 503; the server shuts down.
            Exception: what the engine says is wrong with one of the choices.
        """
        while self._open:
            index, event = await self._queue.get()
            yield index, self._take(index, event)

    def close(self) -> None:
        """Aborts the choices that have not ended. Idempotent."""
        while self._open:
            index, _ = self._open.popitem()
            self._engine.abort(self._engine_id(index))

    def _take(self, index: int, event: Event) -> TokenEvent:
        if isinstance(event, ErrorEvent):
            del self._open[index]
            raise event.error
        timer = self._open[index]
        timer.count_tokens(len(event.token_ids))
        self._num_output_tokens += len(event.token_ids)
        if event.finish_reason is not None:
            del self._open[index]
        if event.finish_reason == "abort":
            raise RequestError("The server is shutting down", http_status=503)
        if event.finish_reason is not None:
            timer.finish()
        return event

    def _engine_id(self, index: int) -> str:
        return f"{self.request_id}-{index}"

    def _on_event_of(self, index: int) -> OnEvent:
        loop, put = self._loop, self._queue.put_nowait

        def on_event(event: Event) -> None:
            try:
                loop.call_soon_threadsafe(put, (index, event))
            except RuntimeError:  # The loop is closed; nobody is waiting for this event.
                logger.debug("an event of request %s came after the server had ended", event.request_id)

        return on_event
