"""The server's end of one lane: what waits for it, in which order, and what becomes of it when the lane dies.

One task asks the lane, one request at a time. A client that leaves takes its request out of the queue; a request that the
lane has already is prepared to the end, within the lane's limits, and forgotten.
"""

from __future__ import annotations

import asyncio
import heapq
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from aotgaudi.errors import RequestError
from aotgaudi.server.intake_lane import LaneLimits, too_large, too_slow
from aotgaudi.server.intake_wire import (
    LENGTHS_BYTES,
    Cause,
    LaneGoneError,
    Message,
    lengths_of,
    message_of,
    prepared_of,
    question,
)
from aotgaudi.server.prepare import Kind, PreparedRequest

MAX_WAITING = 1024
MAX_WAITING_BYTES = 16 << 20
_SECONDS_PER_BYTE = 1e-5


@dataclass(order=True, slots=True)
class _Job:
    """A request that waits. `rank` orders the queue: by arrival, and large ones as if they had come later."""

    rank: float
    number: int
    kind: Kind = field(compare=False)
    raw: bytes = field(compare=False)
    done: asyncio.Future[PreparedRequest] = field(compare=False)


@dataclass(frozen=True)
class Replacement:
    """A new connection to a lane, and why the one before it ended. None: no lane will come any more."""

    connection: socket.socket | None
    cause: Cause


class LaneQueue:
    """What waits for one lane. To be made anywhere, and used on the event loop."""

    def __init__(self, limits: LaneLimits, kill: Callable[[], None]) -> None:
        """`kill` ends a lane that does not answer, from outside."""
        self._limits, self._kill = limits, kill
        self._connection: socket.socket | None = None
        self._newest: socket.socket | None = None
        self._replacements: asyncio.Queue[Replacement] = asyncio.Queue()
        self._waiting: list[_Job] = []
        self._num_open = self._num_bytes = self._number = 0
        self._has_come = asyncio.Event()

    async def prepare(self, kind: Kind, raw: bytes) -> PreparedRequest:
        """Returns what the lane makes of `raw`.

        Raises:
            RequestError: what the lane refuses it with; 400 if the lane died of it; 429 if too much waits for this lane;
                503 if there is no lane.
        """
        if self._num_open >= MAX_WAITING or self._num_bytes + len(raw) > MAX_WAITING_BYTES:
            raise RequestError("Too many requests wait to be read; try again soon", http_status=429)
        self._number += 1
        rank = time.monotonic() + len(raw) * _SECONDS_PER_BYTE
        done: asyncio.Future[PreparedRequest] = asyncio.get_running_loop().create_future()
        job = _Job(rank, self._number, kind, raw, done)
        heapq.heappush(self._waiting, job)
        self._num_open, self._num_bytes = self._num_open + 1, self._num_bytes + len(raw)
        self._has_come.set()
        try:
            return await done
        finally:
            self._num_open, self._num_bytes = self._num_open - 1, self._num_bytes - len(raw)
            job.raw = b""
            self._forget_the_gone()

    def replace(self, replacement: Replacement) -> None:
        """Takes another lane, after the one before it has ended, or word that none will come."""
        if replacement.connection is not None:
            replacement.connection.setblocking(False)
            self._newest = replacement.connection
        elif self._newest is not None:
            with suppress(OSError):  # It is closed already.
                self._newest.shutdown(
                    socket.SHUT_RDWR
                )  # The lane reads its end, and ends; so does who waits for it here.
        self._replacements.put_nowait(replacement)

    async def run(self) -> None:
        """Asks the lane for what waits, for ever."""
        while True:
            job = await self._next()
            try:
                answered = await self._answer(job)
                outcome = prepared_of(answered)
            except Exception as error:
                if not job.done.done():
                    job.done.set_exception(error)
            else:
                if not job.done.done():
                    job.done.set_result(outcome)

    async def _next(self) -> _Job:
        """Waits for a request whose client has not left."""
        while True:
            while self._waiting:
                job = heapq.heappop(self._waiting)
                if not job.done.done():
                    return job
            self._has_come.clear()
            await self._has_come.wait()

    async def _answer(self, job: _Job) -> Message:
        """Returns the lane's answer. A lane that something else ends is given the request once more.

        Raises:
            RequestError: 400 if the lane died of the request, 503 if there is no lane.
        """
        num_bytes = len(job.raw)
        for _ in range(2):
            while not self._replacements.empty():  # The lane before ended while it had nothing to do.
                await self._replaced()
            if self._connection is None:
                break
            try:
                answered = await self._asked(self._connection, question(job.kind, job.raw))
            except OSError:
                cause = await self._replaced()
                if cause == "time":
                    raise too_slow(self._limits, num_bytes) from None
                if cause == "memory":
                    raise too_large(self._limits) from None
                continue
            if answered.head.get("is_last"):
                await self._replaced()
            return answered
        raise RequestError("The server could not read the request: its intake has ended", http_status=503)

    async def _asked(self, connection: socket.socket, message: Message) -> Message:
        """Raises OSError if the lane dies, or says what cannot be."""
        loop = asyncio.get_running_loop()
        deadline = loop.call_later(self._limits.wall_seconds, self._kill)
        try:
            for piece in message.pieces():
                await loop.sock_sendall(connection, piece)
            num_head_bytes, num_tail_bytes = lengths_of(await _received(connection, LENGTHS_BYTES))
            head = await _received(connection, num_head_bytes)
            return message_of(head, await _received(connection, num_tail_bytes))
        finally:
            deadline.cancel()

    async def _replaced(self) -> Cause:
        """Waits for the lane's replacement. Returns why the lane has ended."""
        if self._connection is not None:
            self._connection.close()
        replacement = await self._replacements.get()
        self._connection = replacement.connection
        return replacement.cause

    def _forget_the_gone(self) -> None:
        """Keeps the queue as short as what is open, without looking through it each time that a client leaves."""
        if len(self._waiting) > 2 * (self._num_open + MAX_WAITING // 2):
            self._waiting = [job for job in self._waiting if not job.done.done()]
            heapq.heapify(self._waiting)


async def _received(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    view, start = memoryview(data), 0
    while start < num_bytes:
        num = await asyncio.get_running_loop().sock_recv_into(connection, view[start:])
        if num == 0:
            raise LaneGoneError("the connection was closed")
        start += num
    return bytes(data)
