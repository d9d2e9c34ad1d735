"""One client's connection: uvicorn's HTTP/1.1 protocol with time limits and a stricter parser.

At any time the client owes the server one of three things, each within a time limit:

======  ==========================================  ===================================================
owed    time starts at                              within `client_seconds`
======  ==========================================  ===================================================
head    the opening, or the head's first byte       the whole head
body    the end of the head                         `least_bytes` in each period, or the rest of the body
read    the moment the kernel's buffer is full      `least_bytes` in each period, or the whole buffer
======  ==========================================  ===================================================

uvicorn itself closes idle connections (``timeout_keep_alive``).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Literal, TypeAlias

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from aotgaudi.server.http import error_body
from aotgaudi.server.options import REASONS, ConnectionLimits, Reason

logger = logging.getLogger(__name__)

_MAX_HEAD_BYTES = 16 * 1024
_LOG_SECONDS = 10.0
_COUNTED = ("Invalid HTTP request", "Unsupported upgrade request", "No supported WebSocket library")
"""How uvicorn's messages about a client's bad request begin. We count such requests, or ignore them, but do not log them."""

Owed = Literal["nothing", "head", "body"]
Event: TypeAlias = "h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]"


def _is_wanted(record: logging.LogRecord) -> bool:
    """Returns False for messages that clients can provoke at will, and for tracebacks of tasks that end with the server."""
    is_cancelled = record.exc_info is not None and record.exc_info[0] is asyncio.CancelledError
    return not is_cancelled and not str(record.msg).startswith(_COUNTED)


logger.addFilter(_is_wanted)


class Closures:
    """Counts the connections that the server closes, and logs each reason at most every 10 s."""

    def __init__(self, count: Callable[[Reason], object], clock: Callable[[], float]) -> None:
        self._count, self._clock = count, clock
        self._num_unlogged: dict[Reason, int] = {}
        self._logged_at: dict[Reason, float] = {}

    def add(self, reason: Reason, peer: str) -> None:
        """Counts and logs the closed connection of `peer`."""
        self._count(reason)
        now, num = self._clock(), self._num_unlogged.get(reason, 0) + 1
        self._num_unlogged[reason] = num
        if now - self._logged_at.get(reason, -_LOG_SECONDS) >= _LOG_SECONDS:
            self._num_unlogged[reason], self._logged_at[reason] = 0, now
            logger.warning("%d connection(s) %s; the last from %s", num, REASONS[reason], peer)


class Connection(H11Protocol):  # type: ignore[misc,unused-ignore]
    """One connection. Use it on the event loop only."""

    conn: StrictReader
    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits,
        closures: Closures,
    ) -> None:
        """The first four are uvicorn's."""
        super().__init__(config, server_state, app_state, _loop)
        self.conn, self.logger = StrictReader(), logger
        self._limits, self._closures = limits, closures
        self._owed: Owed = "nothing"
        self._num_read = self._num_unsent = 0
        self._receive_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override,unused-ignore]
        """Part of asyncio's protocol. Refuses connections above the limit."""
        is_full = len(self.connections) >= self._limits.max_connections
        super().connection_made(transport)
        # A low limit, so that we notice at once when a client stops reading. Not 0: a TLS transport is never below that.
        transport.set_write_buffer_limits(high=1)
        if is_full:
            self._close("refused", 503, "The server has as many connections as it takes")
        else:
            self._expect("head")

    def connection_lost(self, exc: Exception | None) -> None:
        """Part of asyncio's protocol."""
        self._expect("nothing")
        self._stop_send_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Part of asyncio's protocol."""
        self._num_read += len(data)
        super().data_received(data)
        self._expect_rest()

    def on_response_complete(self) -> None:
        """Part of uvicorn's life of a request."""
        super().on_response_complete()
        self._expect_rest()

    def pause_writing(self) -> None:
        """Part of asyncio's protocol: the client reads more slowly than we write."""
        super().pause_writing()
        self._start_send_timer()

    def resume_writing(self) -> None:
        """Part of asyncio's protocol."""
        super().resume_writing()
        self._stop_send_timer()

    def send_400_response(self, msg: str) -> None:
        """Part of uvicorn's protocol: refuses bytes that `StrictReader` does not accept as HTTP."""
        del msg
        refusal = self.conn.refusal
        status = 400 if refusal is None else refusal.error_status_hint
        self._close("malformed", status, f"Malformed request: {refusal}")

    # The client's request

    def _expect_rest(self) -> None:
        if self.transport.is_closing():
            self._expect("nothing")
        elif self.conn.their_state is h11.SEND_BODY:
            self._expect("body")
        else:
            self._expect("head" if self.conn.has_partial_head else "nothing")

    def _expect(self, owed: Owed) -> None:
        if owed == self._owed:
            return
        self._owed = owed
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None
        if owed != "nothing":
            self._begin_receive_period()

    def _begin_receive_period(self) -> None:
        self._num_read = 0
        self._receive_timer = self.loop.call_later(self._limits.client_seconds, self._end_receive_period)

    def _end_receive_period(self) -> None:
        is_moving = self._num_read >= self._limits.least_bytes or self.flow.read_paused
        if self._owed == "body" and is_moving and not self._is_answered:
            self._begin_receive_period()
            return
        reason: Reason = "head_timeout" if self._owed == "head" else "body_timeout"
        self._close(reason, 408, "The request did not come to its end in time")

    @property
    def _is_answered(self) -> bool:
        """Whether the client already has an answer, so that the rest of its body is only read and discarded.

        We read on so that the client gets to see why it was refused.
        """
        return self.cycle is not None and self.cycle.response_complete

    # The client's reading of the answer

    def _start_send_timer(self) -> None:
        self._stop_send_timer()
        self._num_unsent = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(self._limits.client_seconds, self._end_send_period)

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _end_send_period(self) -> None:
        if self._num_unsent - self.transport.get_write_buffer_size() >= self._limits.least_bytes:
            self._start_send_timer()
            return
        self._closures.add("write_timeout", self._peer)
        self.transport.abort()

    # The end

    @property
    def _peer(self) -> str:
        return self.client[0] if self.client else "?"

    def _close(self, reason: Reason, status: int, message: str) -> None:
        """Closes the connection. Answers first if the client expects an answer."""
        self._closures.add(reason, self._peer)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        is_silent = reason == "head_timeout" and not self.conn.has_partial_head
        if is_silent or self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        content = json.dumps(error_body(status, message)).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(content))),
            ("connection", "close"),
        ]
        start = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase)
        for event in (start, h11.Data(data=content), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class StrictReader(h11.Connection):
    """The server's side of one connection. Refuses malformed requests that h11 tolerates.

    Two servers that read a message differently may disagree on where it ends (request smuggling). So this class refuses what
    RFC 9112 lets a server refuse: a head with a bare LF (2.2) or a folded line (5.2), a major version other than 1 (2.3),
    and ``Transfer-Encoding`` together with ``Content-Length`` or in HTTP/1.0 (6.1). It also refuses a head of more than
    16 KiB that comes in one piece.

    Attributes:
        refusal: Why it refused the client's bytes; None if it did not.
        has_partial_head: Whether part of a request's head has arrived, but not all of it.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, _MAX_HEAD_BYTES)
        self._sends_chunks = False
        self.refusal: h11.RemoteProtocolError | None = None
        self.has_partial_head = False

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        """Returns the next part of an answer. Has a fast path for chunks, because a stream has one for each token."""
        if isinstance(event, h11.Data) and self._sends_chunks and self.our_state is h11.SEND_BODY:
            return [b"%x\r\n" % len(event.data), event.data, b"\r\n"] if event.data else []
        parts = super().send_with_data_passthrough(event)
        if isinstance(event, h11.Response):
            self._sends_chunks = b"\r\ntransfer-encoding: chunked\r\n" in b"".join(parts or ()).lower()
        return parts

    def next_event(self) -> Event:
        """Returns the next part of a request.

        Raises:
            h11.RemoteProtocolError: the client broke the protocol. Nothing more can be read from it.
        """
        try:
            if self.their_state is h11.IDLE:
                self._check_head()
            event = super().next_event()
            if isinstance(event, h11.Request):
                self.has_partial_head = False
                _check_framing(event)
        except h11.RemoteProtocolError as error:
            self.refusal = error
            raise
        return event

    def _check_head(self) -> None:
        received = self.trailing_data[0]
        self.has_partial_head = bool(received)
        end = received.find(b"\r\n\r\n")
        head = received if end < 0 else received[:end]
        if len(head) > _MAX_HEAD_BYTES:
            raise h11.RemoteProtocolError(
                f"the head is too long: {_MAX_HEAD_BYTES} bytes are allowed", error_status_hint=431
            )
        if head.count(b"\n") != head.count(b"\r\n"):
            raise h11.RemoteProtocolError("a line of the head ends without CR")
        if b"\r\n " in head or b"\r\n\t" in head:
            raise h11.RemoteProtocolError("a line of the head is folded")


def _check_framing(request: h11.Request) -> None:
    if not request.http_version.startswith(b"1."):
        raise h11.RemoteProtocolError("this is a server of HTTP/1.1", error_status_hint=505)
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" not in names:
        return
    if b"content-length" in names:
        raise h11.RemoteProtocolError("Transfer-Encoding and Content-Length exclude each other")
    if request.http_version < b"1.1":
        raise h11.RemoteProtocolError("HTTP/1.0 has no Transfer-Encoding")
