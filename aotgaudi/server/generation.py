"""One HTTP request's outputs: from the engine's thread to the event loop.

::

    engine's thread    _on_event -> loop.call_soon_threadsafe -> queue
    event loop         queue -> Generation.events() -> response

A `Generation` is always closed, and closing aborts what has not ended. So when a client goes away, its KV blocks are
free again after the step that runs now.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from aotgaudi.engine.core import EngineStats
from aotgaudi.engine.output import ErrorEvent, Event, OnEvent, TokenEvent
from aotgaudi.engine.request import NewRequest
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

    @property
    def stalled_seconds(self) -> float:
        """How long no step has ended although there is work; 0 without work. Waits for nothing."""
        ...

    def add(
        self, requests: Sequence[NewRequest], on_event: OnEvent, *, connection: Hashable = None
    ) -> object:
        """Queues all requests, or none. `on_event` is called on the engine's thread. Raises RequestError."""
        ...

    def abort(self, *request_ids: str) -> None:
        """Ends requests early. Ignores ids that are unknown or have ended."""
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
    """The outputs of one HTTP request, one per prompt. Made and used on the event loop.

    `connection` stands for the connection that it came over; None: for none.
    """

    def __init__(
        self,
        engine: EngineLike,
        request_id: str,
        metrics: Metrics,
        clock: Callable[[], float],
        connection: Hashable = None,
    ) -> None:
        self.request_id = request_id
        self._engine, self._metrics, self._clock = engine, metrics, clock
        self._connection, self._arrival = connection, clock()
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._open: dict[str, tuple[int, OutputTimer]] = {}
        self._is_closed = False
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
        requests = [
            NewRequest(f"{self.request_id}-{index}", prompt, params) for index, prompt in enumerate(prompts)
        ]
        self._engine.add(requests, self._on_event, connection=self._connection)
        for index, request in enumerate(requests):
            timer = OutputTimer(self._metrics, self._arrival, self._clock)
            self._open[request.request_id] = (index, timer)
        self._num_prompt_tokens = sum(map(len, prompts))
        self._metrics.prompt_tokens.inc(self._num_prompt_tokens)

    async def events(self) -> AsyncIterator[tuple[int, TokenEvent]]:
        """Yields the new output of all choices as it comes, each with the choice's index, until all have ended.

        Raises:
            RequestError: 503; the server shuts down.
            Exception: what the engine says is wrong with one of the choices.
        """
        while self._open:
            event = await self._queue.get()
            yield self._open[event.request_id][0], self._take(event)

    def close(self) -> None:
        """Aborts the choices that have not ended, and hears no more of them. Idempotent."""
        self._is_closed = True
        if self._open:
            self._engine.abort(*self._open)
            self._open.clear()

    def _take(self, event: Event) -> TokenEvent:
        _, timer = self._open[event.request_id]
        if isinstance(event, ErrorEvent):
            del self._open[event.request_id]
            raise event.error
        timer.count_tokens(len(event.token_ids))
        self._num_output_tokens += len(event.token_ids)
        if event.finish_reason is not None:
            del self._open[event.request_id]
        if event.finish_reason == "abort":
            raise RequestError("The server is shutting down", http_status=503)
        if event.finish_reason is not None:
            timer.finish()
        return event

    def _on_event(self, event: Event) -> None:
        """Called on the engine's thread."""
        if self._is_closed:  # A client that has left must not keep the event loop busy.
            return
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)
        except RuntimeError:  # The loop is closed; nobody is waiting for this event.
            logger.debug("an event of request %s came after the server had ended", event.request_id)
