"""HTTP itself: error bodies, server-sent events, and noticing that a client has gone.

A server learns that a client is gone only from ``receive``: sending to it succeeds. So the work races against the
disconnect, and is cancelled when it loses.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from aotgaudi.errors import RequestError

ResultT = TypeVar("ResultT")

ErrorBody = Mapping[str, Mapping[str, "str | None"]]
"""Errors as OpenAI's API has them: ``{"error": {"message", "type", "param", "code"}}``."""

_TOO_MANY_REQUESTS = 429
_TYPES: Mapping[int, str] = {
    _TOO_MANY_REQUESTS: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_CODES: Mapping[int, str] = {
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_media_type",
    _TOO_MANY_REQUESTS: "rate_limit_exceeded",
    500: "internal_error",
    503: "service_unavailable",
}
INTERNAL_ERROR_MESSAGE = "The server had an error while processing the request; see its log."


def error_body(status: int, message: str, param: str | None = None) -> ErrorBody:
    """Returns the body that goes with `status`."""
    code = "model_not_found" if (status, param) == (404, "model") else _CODES.get(status)
    kind = _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_status(error: Exception) -> int:
    """Returns the status of a refusal; 500 for an error that nobody raised on purpose."""
    return error.http_status if isinstance(error, RequestError) else 500


def body_of(error: Exception) -> ErrorBody:
    """Returns the body of a refusal; that of an unexpected error says nothing about the inside."""
    if isinstance(error, RequestError):
        return error_body(error.http_status, str(error), error.param)
    return error_body(500, INTERNAL_ERROR_MESSAGE)


def error_headers(error: Exception) -> Mapping[str, str]:
    """Returns the headers of a refusal: who came when there was no room may come again soon.

    A place is free as soon as any request ends, which takes a second or so; nobody can promise when it is this client's.
    """
    return {"Retry-After": "1"} if error_status(error) == _TOO_MANY_REQUESTS else {}


class ClientGoneError(ConnectionError):
    """The client closed its connection before it had its answer. Never leaves this package."""


DONE = b"data: [DONE]\n\n"

_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})
"""Ends of lines to Unicode, though not to SSE, and in JSON as good escaped. Clients take streams apart by either rule
(httpx's ``iter_lines`` does by Unicode's)."""


def sse(value: Mapping[str, object]) -> bytes:
    """Returns `value` as one server-sent event. Raises ValueError for a NaN or an infinity, which JSON does not have."""
    encoded = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return b"data: " + escape_line_ends(encoded).encode() + b"\n\n"


def escape_line_ends(encoded: str) -> str:
    """Returns JSON without the ends of lines that JSON allows in strings."""
    return encoded if encoded.isascii() else encoded.translate(_LINE_ENDS)


async def unless_disconnected(work: Coroutine[object, object, ResultT], receive: Receive) -> ResultT:
    """Runs `work`, and cancels it when the client leaves.

    Raises:
        ClientGoneError: the client left first.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_until_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStreamResponse(StreamingResponse):
    """Streams `events` (whole SSE events) until they end or the client leaves, and then calls `on_close`."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], on_close: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application of this response."""
        try:
            await unless_disconnected(self.stream_response(send), receive)
        except ClientGoneError:
            pass  # Nobody is left to be told.
        finally:
            self._on_close()
