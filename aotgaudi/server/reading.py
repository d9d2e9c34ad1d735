"""Reads request bodies, so many bytes of them at once over all connections."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect, Request

from aotgaudi.errors import RequestError
from aotgaudi.server.http import ClientGoneError

DEFAULT_MAX_HELD_BYTES = 64 * 1024 * 1024
_SMALL_BYTES = 16 * 1024
"""So much of a body is read however many others are held: most requests are no larger."""


class BodyReader:
    """Reads bodies of at most `max_bytes`, and holds at most `max_held_bytes` at once, small ones aside.

    A body is held until whoever reads it has parsed it. On the event loop only.
    """

    def __init__(self, max_bytes: int, max_held_bytes: int = DEFAULT_MAX_HELD_BYTES) -> None:
        self._max_bytes, self._max_held_bytes = max_bytes, max_held_bytes
        self._num_held = 0

    @asynccontextmanager
    async def json_bytes(self, request: Request) -> AsyncIterator[bytes]:
        """Gives the body, unparsed. Let go of it before this context ends.

        Raises:
            RequestError: 415 for another content type than JSON, 413 for a body that is too large, 429 where there is no
                room for it now.
            ClientGoneError: the client left before it had sent everything.
        """
        _check_content_type(request.headers.get("content-type", ""))
        self._check_length(_declared_length(request.headers.get("content-length", "")))
        num_held = 0
        try:
            body = bytearray()
            async for chunk in request.stream():
                self._hold(len(chunk), num_held)
                num_held += len(chunk)
                body += chunk
            raw = bytes(body)
            del body
            yield raw
        except ClientDisconnect:
            raise ClientGoneError from None
        finally:
            self._num_held -= num_held

    def _hold(self, num_more: int, num_so_far: int) -> None:
        num_bytes = num_so_far + num_more
        self._check_length(num_bytes)
        if num_bytes > _SMALL_BYTES and self._num_held + num_more > self._max_held_bytes:
            raise RequestError("The server holds as many bytes of requests as it can", http_status=429)
        self._num_held += num_more

    def _check_length(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise RequestError(f"The body is larger than {self._max_bytes} bytes", http_status=413)


def _check_content_type(value: str) -> None:
    media_type = value.partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise RequestError("Content-Type must be 'application/json'", http_status=415)


def _declared_length(value: str) -> int:
    return int(value[:20]) if value.isdecimal() else 0
