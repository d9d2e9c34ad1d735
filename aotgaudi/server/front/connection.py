"""One client's connection: uvicorn's, which waits for its client only so long.

::

    head      a request's head is on its way              from the opening, or the first byte of a further request
    body      its body is on its way                      at least `least_bytes` in each `client_seconds`
    answer    we are at work: no limit
    write     the client has answers of ours to read      at least `least_bytes` in each `client_seconds`
    discard   a refused request's body is thrown away     for `linger_seconds`
    idle      nothing is under way                        for `idle_seconds`
    closing   the last bytes are on their way             as write
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import termios
from typing import Literal, Protocol

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from aotgaudi.server.front.arrivals import PROBES
from aotgaudi.server.front.limits import ConnectionLimits, Reason
from aotgaudi.server.front.refusals import FULL_AND_CLOSED, refusal_of
from aotgaudi.server.front.strict import StrictReader
from aotgaudi.server.front.turnstile import Turnstile
from aotgaudi.server.http import error_body

logger = logging.getLogger(__name__)

Phase = Literal["head", "body", "answer", "write", "discard", "idle", "closing"]

_TIMEOUTS: dict[Phase, Reason] = {
    "head": "head_timeout",
    "body": "body_timeout",
    "discard": "body_timeout",
    "write": "write_timeout",
    "closing": "write_timeout",
    "idle": "idle",
}
_REST_SECONDS = 0.001
"""Between requests that a client sent together. The event loop has other work, which they would outnumber."""
_TOLD = "Invalid HTTP request received."
"""uvicorn's words for a malformed request, which is counted instead."""


def _deserves_a_line(record: logging.LogRecord) -> bool:
    """Malformed requests are counted, and a task that is cancelled when the server ends is no mistake."""
    is_cancelled = record.exc_info is not None and record.exc_info[0] is asyncio.CancelledError
    return not is_cancelled and record.msg != _TOLD


logger.addFilter(_deserves_a_line)


class Watcher(Protocol):
    """What a connection tells its server."""

    limits: ConnectionLimits
    state: ServerState
    turnstile: Turnstile

    def note(self, connection: Connection) -> None:
        """Takes note that `connection` may have begun or ceased to keep us waiting."""
        ...

    def tell(self, reason: Reason, peer: str) -> None:
        """Counts a connection that was closed for `reason`."""
        ...


class Connection(H11Protocol):  # type: ignore[misc,unused-ignore]
    """One connection. On the event loop only."""

    conn: StrictReader
    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop

    def __init__(self, config: uvicorn.Config, watcher: Watcher, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(config, watcher.state, {}, loop)
        self.conn = StrictReader()
        self.logger = logger
        self._watcher, self._limits = watcher, watcher.limits
        self._phase: Phase = "head"
        self._since = loop.time()
        self._num_read = self._num_unsent = 0
        self._held = b""
        """What the client has sent before its turn came."""
        self._is_resting = False

    @property
    def peer(self) -> str:
        """The client's address; "?" where it is not known."""
        return self.client[0] if self.client else "?"

    @property
    def keeps_us_waiting(self) -> bool:
        """Whether it is the client's turn to send something."""
        return self._phase in ("head", "body", "discard", "idle")

    @property
    def has_unread(self) -> bool:
        """Whether the client has sent something that we have not come to yet."""
        if self._held or self._is_resting:
            return True
        num_bytes = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.FIONREAD, b"\0" * 4)
        return any(num_bytes)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override,unused-ignore]
        """Part of asyncio's protocol. The loop's buffer holds nothing unless the client is slow to read."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        self._watcher.note(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Part of asyncio's protocol."""
        super().connection_lost(exc)
        self._phase = "closing"
        self._watcher.note(self)

    def data_received(self, data: bytes) -> None:
        """Part of asyncio's protocol."""
        self._num_read += len(data)
        is_new = self._phase == "head" and not self.app_state.get("is_known")
        if not is_new or data.startswith(PROBES):
            self._receive(data)
            return
        self._held = data
        if not self._watcher.turnstile.come(self):
            self.flow.pause_reading()

    def begin(self) -> None:
        """Part of `Entrant`."""
        held, self._held = self._held, b""
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self._receive(held)

    def turn_back(self) -> bool:
        """Part of `Entrant`. Who waits and comes back on this connection is known."""
        refusal = None if self.conn.has_partial_head else refusal_of(self._held)
        if refusal is None:
            self.begin()
            return False
        self._held = b""
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self.transport.write(refusal)
            self.app_state["is_known"] = True
            if refusal is FULL_AND_CLOSED:
                self.transport.close()
            self._step()
        return True

    def handle_events(self) -> None:
        """Part of uvicorn's reading: begins the next request that has come."""
        if not self._is_resting:
            super().handle_events()

    def _go_on(self) -> None:
        self._is_resting = False
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self.handle_events()
            self._step()

    def _receive(self, data: bytes) -> None:
        super().data_received(data)
        self._step()

    def pause_writing(self) -> None:
        """Part of asyncio's protocol: the client does not read as fast as we write."""
        super().pause_writing()
        self._step()

    def resume_writing(self) -> None:
        """Part of asyncio's protocol."""
        super().resume_writing()
        self._step()

    def on_response_complete(self) -> None:
        """Part of uvicorn's life of a request. Its own timer is not needed."""
        self._is_resting = bool(self.conn.trailing_data[0]) and not self.transport.is_closing()
        super().on_response_complete()
        if self._is_resting:
            self.flow.pause_reading()
            self.loop.call_later(_REST_SECONDS, self._go_on)
        self.app_state["is_known"] = True
        self._unset_keepalive_if_required()
        self._step(is_new=True)

    def _unsupported_upgrade_warning(self) -> None:
        """Does nothing: uvicorn logs two lines for each request that asks for another protocol; it may go on without."""

    def send_400_response(self, msg: str) -> None:
        """Refuses what is not HTTP as we read it."""
        del msg
        refusal = self.conn.refusal
        self._watcher.tell("malformed", self.peer)
        self._refuse(400 if refusal is None else refusal.error_status_hint, f"Malformed request: {refusal}")

    def overdue(self, now: float) -> Reason | None:
        """Returns the reason why the client has had its time; None while it has not."""
        if self._find_phase() != self._phase:
            self._step()
        elapsed, limits = now - self._since, self._limits
        if self._phase == "answer":
            return None
        if self._phase == "idle":
            is_over = elapsed >= limits.idle_seconds
        elif self._phase == "discard":
            is_over = elapsed >= limits.linger_seconds
        else:
            is_over = elapsed >= limits.client_seconds and (
                self._phase == "head" or not self._has_moved_enough()
            )
        return _TIMEOUTS[self._phase] if is_over else None

    def drop(self, reason: Reason) -> None:
        """Ends the connection; its request, if it has one, learns that the client is gone."""
        self._watcher.tell(reason, self.peer)
        if reason in ("head_timeout", "body_timeout") and self.conn.their_state is not h11.DONE:
            self._refuse(408, "The request did not come to its end in time")
        else:
            self.transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        """Answers, if no answer has begun, and closes."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        is_silent = self._phase == "head" and self.conn.refusal is None and not self.conn.has_partial_head
        if is_silent or not self.conn.may_answer:
            self.transport.abort()
            return
        content = json.dumps(error_body(status, message)).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(content))),
            ("connection", "close"),
        ]
        start = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES.get(status, b""))
        for event in (start, h11.Data(data=content), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _step(self, *, is_new: bool = False) -> None:
        """Finds out the phase. Time starts anew with each, and with each request."""
        phase = self._find_phase()
        if is_new or phase != self._phase:
            self._phase = phase
            self._begin_period()
        self._watcher.note(self)

    def _begin_period(self) -> None:
        self._since = self.loop.time()
        self._num_read = 0
        self._num_unsent = self.transport.get_write_buffer_size()

    def _find_phase(self) -> Phase:
        if self.transport.is_closing():
            return "closing"
        if self.flow.write_paused:
            return "write"
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            is_their_turn = cycle.more_body and not cycle.waiting_for_100_continue
            return "body" if is_their_turn and not self.flow.read_paused else "answer"
        if self.conn.their_state is h11.SEND_BODY:
            return "discard"
        is_first = cycle is None and not self.app_state.get("is_known")
        return "head" if is_first or self.conn.has_partial_head else "idle"

    def _has_moved_enough(self) -> bool:
        """Whether this period moved what it should; if so, the next begins."""
        num_sent = self._num_unsent - self.transport.get_write_buffer_size()
        if (self._num_read if self._phase == "body" else num_sent) < self._limits.least_bytes:
            return False
        self._begin_period()
        return True
