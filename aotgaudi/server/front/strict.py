"""Reads requests with h11, and refuses what h11 forgives.

Two servers that read one message differently can be made to disagree on where it ends; so what RFC 9112 lets a server
refuse is refused here: a head with a bare LF (2.2) or a folded line (5.2), another major version than 1 (2.3),
``Transfer-Encoding`` beside ``Content-Length``, or in HTTP/1.0 (6.1). And a head of more than 16 KiB, which h11 takes
where it comes in one piece.
"""

from __future__ import annotations

from typing import TypeAlias

import h11

_MAX_HEAD_BYTES = 16 * 1024

Event: TypeAlias = (
    "h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]"  # What `h11.Connection.next_event` returns.
)


class StrictReader(h11.Connection):
    """The server's side of one connection.

    Attributes:
        refusal: Why the client's bytes were refused; None while they are not.
        has_partial_head: Whether some of a request's head has come, but not all.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, _MAX_HEAD_BYTES)
        self._sends_chunks = False
        self.refusal: h11.RemoteProtocolError | None = None
        self.has_partial_head = False

    @property
    def may_answer(self) -> bool:
        """Whether an answer may begin now."""
        return self.our_state in (h11.IDLE, h11.SEND_RESPONSE)

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        """Returns the next part of an answer. A chunk of a body is short work: a stream has one for each token."""
        if isinstance(event, h11.Data) and self._sends_chunks and self.our_state is h11.SEND_BODY:
            return [b"%x\r\n" % len(event.data), event.data, b"\r\n"] if event.data else []
        parts = super().send_with_data_passthrough(event)
        if isinstance(event, h11.Response):
            self._sends_chunks = b"\r\ntransfer-encoding: chunked\r\n" in b"".join(parts or ()).lower()
        return parts

    def next_event(self) -> Event:
        """Returns the next part of a request.

        Raises:
            h11.RemoteProtocolError: the client broke the protocol. Nothing more can be read.
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
