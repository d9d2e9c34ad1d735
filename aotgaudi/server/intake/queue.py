"""The server's end of one lane: what waits for it, in which order, and what becomes of it when the lane dies.

One task asks the lane, some small requests at a time, which it answers one after the other. A client that leaves takes its
request out of the queue; one that the lane has already is prepared to the end, within the lane's limits, and forgotten.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from aotgaudi.errors import RequestError
from aotgaudi.server.intake.lane import LaneLimits, too_large, too_slow
from aotgaudi.server.intake.prepare import Kind, PreparedRequest
from aotgaudi.server.intake.wire import (
    LENGTHS_BYTES,
    Cause,
    LaneGoneError,
    Message,
    lengths_of,
    message_of,
    prepared_of,
    question,
)

_MAX_CLOSED = 512
"""How many closed jobs the queue may hold before it is cleared of them."""
_SECONDS_PER_DOUBLING = 2.0
_MAX_ASKED, _MAX_ASKED_BYTES = 4, 64 << 10
"""Requests that are asked at once: each turn of the event loop may be long. What is more than a socket holds goes alone."""
_CHUNK_BYTES = 256 << 10
_MAX_LOST = 2


@dataclass(order=True, slots=True)
class _Job:
    """A request that waits. `rank` orders the queue; see `LaneQueue`."""

    rank: float
    number: int
    kind: Kind = field(compare=False)
    raw: bytes = field(compare=False)
    done: asyncio.Future[PreparedRequest] = field(compare=False)
    num_bytes: int = field(compare=False)
    is_open: bool = field(default=True, compare=False)
    is_asked: bool = field(default=False, compare=False)
    num_lost: int = field(default=0, compare=False)
    """Lanes that ended, for no fault of this request, before they had answered it."""

    def settle(self, answered: Message) -> None:
        """Hands the lane's answer over, if the client is still there."""
        if self.done.done():
            return
        try:
            self.done.set_result(prepared_of(answered))
        except Exception as error:
            self.done.set_exception(error)

    def refuse(self, error: RequestError) -> None:
        """Ends the request, if the client is still there."""
        if not self.done.done():
            self.done.set_exception(error)


class _Waiting:
    """What a lane has not been asked yet, in order of rank."""

    def __init__(self) -> None:
        self._jobs: list[_Job] = []
        self._num_closed = 0

    def add(self, job: _Job) -> None:
        """Takes `job` in."""
        heapq.heappush(self._jobs, job)

    def take(self, num_bytes: int | None = None) -> _Job | None:
        """Returns the first one, from now on asked; None if nobody waits, or if it is longer than `num_bytes`."""
        while self._jobs and not self._jobs[0].is_open:
            heapq.heappop(self._jobs)
            self._num_closed -= 1
        if not self._jobs or (num_bytes is not None and self._jobs[0].num_bytes > num_bytes):
            return None
        job = heapq.heappop(self._jobs)
        job.is_asked = True
        return job

    def close(self, job: _Job) -> None:
        """Forgets a request, wherever it is; does nothing if that was done before. O(1), but now and then."""
        if not job.is_open:
            return
        job.is_open, job.raw = False, b""
        self._num_closed += not job.is_asked
        if self._num_closed > _MAX_CLOSED + len(self._jobs) // 2:
            self._jobs = [other for other in self._jobs if other.is_open]
            heapq.heapify(self._jobs)
            self._num_closed = 0


class _Line:
    """A connection to a lane. Takes more than one answer at a time from the kernel, if there are more."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._buffer = connection, bytearray()
        self._loop = asyncio.get_running_loop()

    async def ask(self, jobs: Sequence[_Job]) -> None:
        """Sends all of it. Raises OSError."""
        pieces = [piece for job in jobs for piece in question(job.kind, job.raw).pieces()]
        for piece in (b"".join(pieces),) if len(jobs) > 1 else pieces:
            await self._loop.sock_sendall(self._connection, piece)

    async def answer(self) -> Message:
        """Waits for the next answer. Raises OSError if the lane dies before, or says what cannot be."""
        num_head_bytes, num_tail_bytes = lengths_of(await self._take(LENGTHS_BYTES))
        return message_of(await self._take(num_head_bytes), await self._take(num_tail_bytes))

    def close(self) -> None:
        self._connection.close()

    async def _take(self, num_bytes: int) -> bytes:
        while len(self._buffer) < num_bytes:
            received = await self._loop.sock_recv(self._connection, _CHUNK_BYTES)
            if not received:
                raise LaneGoneError("the connection was closed")
            self._buffer += received
        taken = bytes(self._buffer[:num_bytes])
        del self._buffer[:num_bytes]
        return taken


@dataclass(frozen=True)
class Replacement:
    """A new connection to a lane, and why the one before it ended. None: no lane will come any more."""

    connection: socket.socket | None
    cause: Cause


class LaneQueue:
    """What waits for one lane. To be made anywhere, and used on the event loop.

    The order matters only when much waits. Then short bodies go first: they keep the others waiting the least. So that long
    ones have their turn, twice the length counts as having come 2 s later. Admission bounds the queue
    (aotgaudi/engine/admission.py).
    """

    def __init__(self, limits: LaneLimits, kill: Callable[[], None]) -> None:
        """`kill` ends a lane that does not answer, from outside."""
        self._limits, self._kill = limits, kill
        self._line: _Line | None = None
        self._newest: socket.socket | None = None
        self._replacements: asyncio.Queue[Replacement] = asyncio.Queue()
        self._waiting = _Waiting()
        self._number = 0
        self._has_come = asyncio.Event()

    async def prepare(self, kind: Kind, raw: bytes) -> PreparedRequest:
        """Returns what the lane makes of `raw`.

        Raises:
            RequestError: what the lane refuses it with; 400 if the lane died of it; 503 if there is no lane.
        """
        self._number += 1
        rank = time.monotonic() + _SECONDS_PER_DOUBLING * math.log2(len(raw) + 1)
        done: asyncio.Future[PreparedRequest] = asyncio.get_running_loop().create_future()
        job = _Job(rank, self._number, kind, raw, done, len(raw))
        self._waiting.add(job)
        self._has_come.set()
        try:
            return await done
        finally:
            self._waiting.close(job)

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
        """Asks the lane for what waits, for ever. What a lane that ends leaves unanswered, the next one is asked."""
        while True:
            jobs = await self._next()
            while jobs:
                await self._answer(jobs)

    async def _next(self) -> deque[_Job]:
        """Waits for requests whose clients have not left."""
        while (job := self._waiting.take()) is None:
            self._has_come.clear()
            await self._has_come.wait()
        jobs, num_bytes = deque([job]), job.num_bytes
        while len(jobs) < _MAX_ASKED and (other := self._waiting.take(_MAX_ASKED_BYTES - num_bytes)):
            jobs.append(other)
            num_bytes += other.num_bytes
        return jobs

    async def _answer(self, jobs: deque[_Job]) -> None:
        """Takes from `jobs` what one lane answers, and what it dies of. There may be none: then all are refused."""
        while not self._replacements.empty():  # The lane before ended while it had nothing to do.
            await self._replaced()
        if self._line is None:
            self._refuse_all(jobs)
            return
        try:
            await self._line.ask(jobs)
            while jobs:
                answered = await self._in_time(self._line)
                jobs.popleft().settle(answered)
                if answered.head.get("is_last"):
                    await self._replaced()
                    return
        except OSError:
            self._blame(jobs, await self._replaced())

    async def _in_time(self, line: _Line) -> Message:
        deadline = asyncio.get_running_loop().call_later(self._limits.wall_seconds, self._kill)
        try:
            return await line.answer()
        finally:
            deadline.cancel()

    def _blame(self, jobs: deque[_Job], cause: Cause) -> None:
        """Refuses what the lane was at when it ended, if that was its fault or if lanes keep ending over it."""
        job = jobs[0]
        job.num_lost += 1
        if cause == "time":
            job.refuse(too_slow(self._limits, len(job.raw)))
        elif cause == "memory":
            job.refuse(too_large(self._limits))
        elif job.num_lost >= _MAX_LOST:
            job.refuse(_no_lane())
        if job.done.done():
            jobs.popleft()

    def _refuse_all(self, jobs: deque[_Job]) -> None:
        for job in jobs:
            job.refuse(_no_lane())
        jobs.clear()

    async def _replaced(self) -> Cause:
        """Waits for the lane's replacement. Returns why the lane has ended."""
        if self._line is not None:
            self._line.close()
        replacement = await self._replacements.get()
        self._line = None if replacement.connection is None else _Line(replacement.connection)
        return replacement.cause


def _no_lane() -> RequestError:
    return RequestError("The server could not read the request: its intake has ended", http_status=503)
