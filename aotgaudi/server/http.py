"""HTTP: reading bodies, error bodies, server-sent events, and clients that leave.

Only ``receive`` reveals that a client is gone; sending still succeeds. So work for a client runs in parallel with
``receive`` and is cancelled when the client disconnects.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from aotgaudi.engine.admission import Admission
from aotgaudi.errors import RequestError
from aotgaudi.server.preprocess.body import BodyError

ResultT = TypeVar("ResultT")

ErrorBody = Mapping[str, Mapping[str, "str | int | None"]]
"""Errors as vLLM has them: ``{"error": {"message", "type", "param", "code"}}``, where the code is the HTTP status."""

_UNAUTHORIZED = 401
_TOO_MANY_REQUESTS = 429
_TYPES: Mapping[int, str] = {
    400: "BadRequestError",
    404: "NotFoundError",
    413: "Request Entity Too Large",  # Python 3.13 has another phrase.
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
"""vLLM's types (vllm/entrypoints/serve/exception_handling). For other statuses, bodies and paths it is HTTP's phrase."""
_HEADERS: Mapping[int, Mapping[str, str]] = {
    _UNAUTHORIZED: {"WWW-Authenticate": "Bearer"},
    _TOO_MANY_REQUESTS: {"Retry-After": "1"},
}


def error_body(status: int, message: str, param: str | None = None, *, is_of_http: bool = False) -> ErrorBody:
    """Returns the error body for `status`. With `is_of_http`, the type is the status's phrase."""
    kind = None if is_of_http else _TYPES.get(status)
    kind = kind or HTTPStatus(status).phrase
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_status(error: Exception) -> int:
    """Returns the status of a refusal; 500 for an unexpected error."""
    return error.http_status if isinstance(error, RequestError) else 500


def body_of(error: Exception) -> ErrorBody:
    """Returns the error body for `error`. For an unexpected error it reveals nothing internal."""
    if isinstance(error, RequestError):
        is_of_body = isinstance(error, BodyError)
        return error_body(error.http_status, str(error), error.param, is_of_http=is_of_body)
    return error_body(500, "The server had an error while processing the request; see its log.")


def error_headers(error: Exception) -> Mapping[str, str]:
    """Returns the headers of a refusal: when to retry after a 429, and the scheme of authentication for a 401.

    Every request that ends makes room, which takes a second or so. The server cannot promise more.
    """
    return _HEADERS.get(error_status(error), {})


class ClientGoneError(ConnectionError):
    """The client closed its connection before it had its answer. Stays in this package."""


DONE = b"data: [DONE]\n\n"

_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})
"""Characters that end a line in Unicode, but not in SSE. Escaping them keeps the JSON's meaning, and lets clients that split
streams at Unicode's line ends (such as httpx's ``iter_lines``) read it."""


def sse(value: Mapping[str, object]) -> bytes:
    """Returns `value` as one server-sent event. Raises ValueError for NaN and infinity, which JSON cannot express."""
    encoded = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return b"data: " + escape_line_ends(encoded).encode() + b"\n\n"


def escape_line_ends(encoded: str) -> str:
    """Returns `encoded`, a JSON text, with the line ends in its strings escaped."""
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
            pass  # The client is gone.
        finally:
            self._on_close()


class BodyReader:
    """Reads bodies of at most `max_bytes` each. Use it on the event loop only."""

    def __init__(self, admission: Admission, max_bytes: int) -> None:
        """`admission` limits the bytes of all bodies together."""
        self._admission, self._max_bytes = admission, max_bytes

    @asynccontextmanager
    async def json_bytes(self, request: Request) -> AsyncIterator[bytes]:
        """Yields the unparsed body. Admission counts its bytes until this context ends.

        Raises:
            RequestError: 415 if the content type is not JSON, 413 if the body is too large, 429 if there is no room for it
                now.
            ClientGoneError: the client left before it had sent the whole body.
        """
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json" and not media_type.endswith("+json"):
            raise RequestError("Content-Type must be 'application/json'", http_status=415)
        declared = request.headers.get("content-length", "")
        self._check_length(int(declared[:20]) if declared.isdecimal() else 0)
        num_held = 0
        try:
            body = bytearray()
            async for chunk in request.stream():
                self._check_length(num_held + len(chunk))
                self._admission.hold(len(chunk), num_held)
                num_held += len(chunk)
                body += chunk
            raw = bytes(body)
            del body
            yield raw
        except ClientDisconnect:
            raise ClientGoneError from None
        finally:
            self._admission.release(num_held)

    def _check_length(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise RequestError(f"The body is larger than {self._max_bytes} bytes", http_status=413)
