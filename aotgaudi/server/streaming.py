"""Server-sent events, and noticing that a client has gone.

A server only learns that a client is gone from ``receive``: sending to it succeeds. So the work races
against the disconnect, and loses.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

ResultT = TypeVar("ResultT")

DONE = b"data: [DONE]\n\n"


class ClientGoneError(ConnectionError):
    """The client closed its connection before it had its answer. Never leaves `server`."""


def sse(value: Mapping[str, object]) -> bytes:
    """`value` as one server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def unless_disconnected(work: Coroutine[object, object, ResultT], receive: Receive) -> ResultT:
    """Runs `work`, and cancels it when the client goes.

    Raises:
        ClientGoneError: the client has gone first.
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
    """Streams `events` (whole SSE events) until they end or the client goes, and then calls `on_close`."""

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
