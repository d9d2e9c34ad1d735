"""How long a server is waited for: a time for its answer as a whole, and a least rate for what follows.

A read with a time limit of its own ends only when nothing at all comes: a server that sends a byte now and then is waited
for without end. Here every read of a connection gets what is left of the whole: heads, chunk sizes and trailers too, in
clear text and in TLS. The rate is of the content, so that what a server wraps it in counts for nothing.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from urllib3.connectionpool import HTTPConnectionPool


@dataclass(frozen=True, slots=True)
class Limits:
    """`connect_seconds` to each address; `answer_seconds` from a request to the end of its answer's head.

    `document_seconds` for a manifest, a token or an error message, whole. Of an object, `least_bytes_per_second` on the
    average of every `window_seconds`. An upload's answer may take a second more for each `hashed_bytes_per_second`.
    """

    connect_seconds: float = 10.0
    answer_seconds: float = 30.0
    document_seconds: float = 30.0
    window_seconds: float = 30.0
    least_bytes_per_second: float = 8192.0
    hashed_bytes_per_second: float = 8 << 20


DEFAULT_LIMITS = Limits()


class SlowError(TimeoutError):
    """A server that was given up; says what it sent, in how long."""


class Pace:
    """What is left of the time for one answer. Methods raise SlowError when it is over. Not safe in threads."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`seconds` for the head of the answer; None of `within` and `keep_up` is called before that is there."""
        self._clock = clock
        self._rate = 0.0
        self.within(seconds)

    def within(self, seconds: float) -> None:
        """From now on everything must come in `seconds`, however little each read brings."""
        self._began, self._seconds = self._clock(), seconds
        self._num_bytes, self._rate = 0, 0.0

    def keep_up(self, limits: Limits) -> None:
        """From now on, content must come (or go) at the least rate, in each window of time."""
        self.within(limits.window_seconds)
        self._rate = limits.least_bytes_per_second

    def count(self, num_bytes: int) -> None:
        """Notes that `num_bytes` of content came, or went."""
        self._num_bytes += num_bytes
        self.seconds_left()

    def seconds_left(self) -> float:
        """How long the next read may take, more than 0."""
        passed = self._clock() - self._began
        if passed < self._seconds:
            return self._seconds - passed
        if not self._rate or self._num_bytes < self._rate * passed:
            raise SlowError(
                f"sent {self._num_bytes} bytes in {passed:.0f} s" if self._rate else _silence(passed)
            )
        self._began, self._num_bytes = self._clock(), 0
        return self._seconds


def _silence(seconds: float) -> str:
    return f"has not answered in {seconds:.0f} s"


class _PacedFile(io.RawIOBase):
    """What a socket receives, each read with the time that `pace` leaves."""

    def __init__(self, sock: socket.socket, pace: Pace) -> None:
        self._socket, self._pace = sock, pace
        self._file = sock.makefile("rb", buffering=0)  # It keeps the socket open until we close.

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:  # A window of time may end, and the next begin, while nothing comes.
            self._socket.settimeout(self._pace.seconds_left())
            with contextlib.suppress(TimeoutError):
                return self._socket.recv_into(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


class _PacedSocket:
    """As much of a socket as `http.client.HTTPResponse` asks for."""

    def __init__(self, sock: socket.socket, pace: Pace) -> None:
        self._socket, self._pace = sock, pace

    def makefile(self, _: str) -> io.BufferedReader:
        return io.BufferedReader(_PacedFile(self._socket, self._pace))


def pace_connections(pools: dict[str, type[HTTPConnectionPool]]) -> dict[str, Any]:
    """Returns connection pools, by scheme, like `pools`, whose read time limits are for the whole head of an answer.

    Every response of theirs has its `Pace` as an attribute ``pace``.
    """
    return {scheme: _paced_pool(pool) for scheme, pool in pools.items()}


def _paced_pool(pool: Any) -> Any:
    connection: Any = pool.ConnectionCls

    class Paced(connection):  # type: ignore[misc]
        def response_class(self, sock: socket.socket, *args: Any, **options: Any) -> http.client.HTTPResponse:
            self.pace = Pace(float(self.timeout))
            return http.client.HTTPResponse(_PacedSocket(sock, self.pace), *args, **options)  # type: ignore[arg-type]

        def getresponse(self) -> Any:
            response = super().getresponse()
            response.pace = self.pace
            return response

    return type(pool.__name__, (pool,), {"ConnectionCls": Paced})
