"""The engine as the API server sees it: another process that receives requests and reports tokens.

Admission is decided in the API server's process, so refusing requests costs the engine no time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from aotgaudi.engine.admission import Admission
from aotgaudi.engine.limits import AdmissionLimits
from aotgaudi.engine.output import ErrorEvent, Event, OnEvent
from aotgaudi.engine.request import NewRequest
from aotgaudi.engine.stats import EngineStats
from aotgaudi.errors import RequestError
from aotgaudi.llm.running import Warmth
from aotgaudi.server.engine.channel import Abort, Add, Ask, Frames, Running, Status, Stop, Told, frame
from aotgaudi.server.engine.start import EngineProcess

logger = logging.getLogger(__name__)

_REFRESH_SECONDS = 1.0
_DIED = "the engine has died; the server must be restarted"


class EngineClient(asyncio.Protocol):
    """The engine. After `attach`, use it on the event loop only. No method blocks.

    If the process ends without being asked to, the engine has died. Open requests then end with an error, and new ones are
    refused.

    Args:
        process: The engine's running process.
        running: What that process has reported about itself.
        limits: How much may be open at once.
        on_step: Receives the kind of entry and the seconds of each step.
        clock: Seconds from an arbitrary start.
    """

    def __init__(
        self,
        process: EngineProcess,
        running: Running,
        limits: AdmissionLimits,
        on_step: Callable[[str, float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._process, self._on_step, self._clock = process, on_step, clock
        self.admission = Admission(running.rules, limits)
        self._status, self._texts = running.status, dict[int, str]()
        self._frames = Frames()
        self._asked: asyncio.Future[None] | None = None
        self._progress_at = clock()
        self._is_stopping = self._has_ended = False
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        self.failure: Exception | None = None

    def attach(self) -> None:
        """Starts to exchange messages on the running event loop."""
        loop, connection = asyncio.get_running_loop(), self._process.connection
        connection.setblocking(False)
        self._attaching = loop.create_task(loop.create_unix_connection(lambda: self, sock=connection))

    def token_text(self, token_id: int) -> str:
        """Returns the text of a token. Some event must have carried its log-probability."""
        return self._texts[token_id]

    # Calls from the server

    def add(self, requests: Sequence[NewRequest], on_event: OnEvent) -> None:
        """Admits and queues all of `requests`, or none. Raises RequestError as `Admission.enter` and `RequestRules` do."""
        resolved = self.admission.rules.resolve(requests)
        was_idle = not self.admission.num_open
        self.admission.enter(resolved, on_event)
        if was_idle:
            self._progress_at = self._clock()
        self._say(Add(tuple(resolved)))

    def abort(self, *request_ids: str) -> None:
        """Ends requests early. Ignores ids that are unknown or have ended."""
        known = tuple(name for name in request_ids if name in self.admission)
        if known and not self._has_ended:
            self._say(Abort(known))

    def drain(self) -> bool:
        """Refuses new requests, and returns whether all others have ended. Does not wait for them."""
        self.admission.close("the server is shutting down")
        return not self.admission.num_open

    def shutdown(self) -> bool:
        """Aborts all requests and tells the process to end. Returns whether it has ended. Does not wait for it."""
        self.drain()
        if not self._is_stopping and not self._has_ended:
            self._is_stopping = True
            self._say(Stop())
        return self._has_ended

    @property
    def stalled_seconds(self) -> float:
        """How long no step has ended although there are open requests; 0 if there are none."""
        return self._clock() - self._progress_at if self.admission.num_open else 0.0

    def stats(self) -> EngineStats:
        """Returns the engine's last snapshot. `refresh` gets a new one."""
        return replace(
            self._status.stats,
            num_refused=self.admission.num_refused,
            stalled_seconds=self.stalled_seconds,
        )

    def warmth(self) -> Warmth:
        """Returns how warm the engine was at its last snapshot."""
        return self._status.warmth

    async def refresh(self) -> None:
        """Gets a new snapshot from the engine, and waits at most a second for it."""
        if self._has_ended:
            return
        if self._asked is None:
            self._asked = asyncio.get_running_loop().create_future()
            self._say(Ask())
        await asyncio.wait([self._asked], timeout=_REFRESH_SECONDS)

    # Messages from the engine

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of `asyncio.Protocol`."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.writelines(self._unsent)

    def data_received(self, data: bytes) -> None:
        """Part of `asyncio.Protocol`."""
        for message in self._frames.feed(data):
            if isinstance(message, Told):
                self._take(message)
            elif isinstance(message, Status):
                self._status = message
                self._answer()

    def connection_lost(self, error: Exception | None) -> None:
        """Part of `asyncio.Protocol`: the process has ended, or has closed its end."""
        del error
        self._has_ended, ended = True, self._process.ended()
        self._answer()
        if not self._is_stopping:
            logger.error("%s; restart the server", ended)
            self.failure = ended
            self.admission.close(_DIED)
        refusal = RequestError(_DIED, http_status=503)
        self._tell([ErrorEvent(request_id=name, error=refusal) for name in self.admission])

    def _say(self, message: object) -> None:
        if self._transport is None:
            self._unsent.append(frame(message))
        else:
            self._transport.write(frame(message))

    def _answer(self) -> None:
        if self._asked is not None:
            self._asked.set_result(None)
            self._asked = None

    def _take(self, told: Told) -> None:
        self._progress_at = self._clock()
        for kind, seconds in told.steps:
            self._on_step(kind, seconds)
        self._texts.update(told.texts)
        self._tell(told.events)

    def _tell(self, events: Sequence[Event]) -> None:
        for event in events:
            on_event = self.admission.listener(event.request_id)
            if isinstance(event, ErrorEvent) or event.finish_reason is not None:
                self.admission.leave(event.request_id)
            if on_event is not None:
                on_event(event)
