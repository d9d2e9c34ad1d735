"""Runs the application on a socket until a signal says to stop, and then brings it to rest.

::

    signal       /ready and new requests get 503, the socket stays open     for `StopTimes.delay`
    then         the socket closes, running requests go on                  for `StopTimes.drain` at most
    then         what still runs is aborted: streams end with an error      for `StopTimes.flush` at most
    then         the process ends
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from aotgaudi.errors import SpecError
from aotgaudi.server.front.limits import DEFAULT_LIMITS, ConnectionLimits, Reason
from aotgaudi.server.front.listener import Listener
from aotgaudi.server.front.turns import event_loop

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL_SECONDS = 0.05
_HOUSEKEEPING_SECONDS = 5.0
_MAX_PORT = 65535

OnListening = Callable[[str, int], None]
"""Called once requests are answered, with the address and the port (the real one, where 0 was asked for)."""


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket bound to `host` (name or address) and `port` (0: any free one) that does not listen yet.

    Raises:
        SpecError: the address cannot be bound: it is in use, not of this machine, or not allowed.
    """
    where = f"{host}:{port}"
    if not 0 <= port <= _MAX_PORT:
        raise SpecError(where, "is not an address to listen on", f"a port is from 0 to {_MAX_PORT}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SpecError(where, f"is not an address to listen on: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _refused(where, error) from error
    return listener


def _refused(where: str, error: OSError) -> SpecError:
    return SpecError(
        where, f"cannot be listened on: {error.strerror}", "choose another with --host and --port"
    )


class Served(Protocol):
    """What a server asks of the service: whether it is full, and, when it is told to stop, the rest. None of it blocks."""

    def turns_away(self) -> bool:
        """Returns whether a further request of a new connection finds no room, and counts it as refused if so."""
        ...

    def begin_drain(self) -> None:
        """Refuses new requests from now on. Any thread, signal handlers included."""
        ...

    def has_drained(self) -> bool:
        """Returns whether no request runs any more."""
        ...

    def has_ended(self) -> bool:
        """Aborts what still runs, and returns whether that has ended."""
        ...


@dataclass(frozen=True, kw_only=True)
class StopTimes:
    """How long the stages of a stop may take, in seconds.

    Attributes:
        delay: After SIGTERM the socket stays open for so long, while new requests get 503. A load balancer that polls
            ``/ready`` stops sending in this time. SIGINT and a second signal do without.
        drain: Requests that run get so long to end; those that are left are aborted, and told so.
        flush: Answers that are complete get so long to reach their clients.
    """

    delay: float = 5.0
    drain: float = 30.0
    flush: float = 5.0


class HttpServer(uvicorn.Server):  # type: ignore[misc,unused-ignore]
    """An application on a bound socket. `run_until_stopped` blocks; `stop` may be called on any thread.

    `on_listening` is called once requests are answered, and `on_close` with the reason whenever the server ends a
    connection, or does not begin one, for a reason of its own. `housekeeping` is called every few seconds on the event
    loop. Threads are not needed to stop.
    """

    started: bool
    force_exit: bool

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        service: Served,
        *,
        on_listening: OnListening,
        stop_times: StopTimes = StopTimes(),
        limits: ConnectionLimits = DEFAULT_LIMITS,
        on_close: Callable[[Reason], None] = lambda _: None,
        housekeeping: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(_config(app))
        self._socket, self._service = listener, service
        self._listener = Listener(
            listener, self.config, self.server_state, limits, on_close, service.turns_away
        )
        self._on_listening, self._stop_times = on_listening, stop_times
        self._housekeeping, self._housekeeping_at = housekeeping, 0.0
        self._stop_at = math.inf

    def run_until_stopped(self) -> None:
        """Listens, and serves until told to stop: by `stop`, or, on the main thread, by SIGTERM or SIGINT.

        Call it when everything is verified and loaded. A second SIGINT gives running requests no more time.

        Raises:
            SpecError: the address is in use by now.
        """
        try:
            self._listener.listen()
        except OSError as error:
            host, port = self._socket.getsockname()[:2]
            self._socket.close()
            raise _refused(f"{host}:{port}", error) from error
        self.run()

    def stop(self) -> None:
        """Ends `run_until_stopped` as SIGINT does. Returns at once."""
        self.handle_exit(signal.SIGINT, None)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Part of uvicorn's life: when it has come to rest, the process ends, and no further signal is needed for that."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        for number in _SIGNALS:
            signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins to drain. Unlike uvicorn's own, it does not die of the signal after a graceful end."""
        del frame
        self._service.begin_drain()
        is_second = self._stop_at < math.inf
        has_delay = sig == signal.SIGTERM and not is_second
        self._stop_at = time.monotonic() + (self._stop_times.delay if has_delay else 0)
        self.force_exit = self.force_exit or (is_second and sig == signal.SIGINT)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Part of uvicorn's life. Connections are taken by our own listener, not by the event loop's."""
        del sockets
        self.servers: list[asyncio.Server] = []
        self._listener.start()
        self.started = True
        self._on_listening(*self._socket.getsockname()[:2])

    @property
    def num_connections(self) -> int:
        """How many connections are open. Any thread."""
        return len(self.server_state.connections)

    async def on_tick(self, counter: int) -> bool:
        """Part of uvicorn's life: returns whether to stop listening."""
        now = time.monotonic()
        if now >= self._housekeeping_at:
            self._housekeeping_at = now + _HOUSEKEEPING_SECONDS
            self._housekeeping()
        return await super().on_tick(counter) or now >= self._stop_at

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Part of uvicorn's life: closes the socket, lets requests end, aborts the others, ends the service."""
        self._listener.close()
        if not await self._until(self._service.has_drained, self._stop_times.drain):
            logger.warning("requests still ran after %g s and are aborted", self._stop_times.drain)
        if not await self._until(self._service.has_ended, self._stop_times.flush, is_hurried=False):
            logger.warning("the engine did not end within %g s", self._stop_times.flush)
        await self._until(lambda: not self.server_state.tasks, self._stop_times.flush)
        for connection in list(self.server_state.connections):
            if connection.cycle is not None and not connection.cycle.response_complete:
                connection.transport.abort()  # Its client does not read, or has not sent its request to the end.
        await super().shutdown(sockets)

    async def _until(self, condition: Callable[[], bool], seconds: float, *, is_hurried: bool = True) -> bool:
        """Waits for `condition`, `seconds` at most. Returns whether it came.

        What `is_hurried` is not waited for once `force_exit` is set. The step that runs is: to end a process in the middle
        of one is to crash.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if (is_hurried and self.force_exit) or time.monotonic() >= deadline:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return True


def _config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop=f"{event_loop.__module__}:{event_loop.__name__}",
        lifespan="off",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=1,
    )
