"""Binds a socket, runs the application on it until a signal says to stop, and then brings it to rest.

A server binds before it loads the model, so that a mistake shows at once, and listens when it is ready.

::

    signal       /ready and new requests get 503, the socket stays open     for `StopTimes.delay`
    then         the socket closes, running requests go on                  for `StopTimes.drain` at most
    then         requests that still run are aborted with an error          for `StopTimes.flush` at most
    then         the process ends

If the engine or the preprocessor pool dies, the server stops at once, without the delay.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

from aotgaudi.errors import SpecError
from aotgaudi.server.options import DEFAULT_STOP_TIMES, MAX_CONNECTIONS, StopTimes

if TYPE_CHECKING:
    import ssl

    from aotgaudi.server.service import Service

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL_SECONDS = 0.05
_GOODBYE_SECONDS = 0.5
_HOUSEKEEPING_SECONDS = 5.0
_KEEP_ALIVE_SECONDS = 75
"""How long a connection may wait for its next request: as with nginx, longer than nginx's own connections to a server."""
_MAX_HEAD_BYTES = 16 * 1024

OnListening = Callable[[str], None]
"""Called once the server answers requests, with its URL (which has the real port if 0 was asked for)."""


class HttpServer(uvicorn.Server):  # type: ignore[misc,unused-ignore]
    """An application on a bound socket, with TLS if `tls` is given. `stop` may be called on any thread.

    `on_listening` is called once requests are answered, and `housekeeping` every few seconds on the event loop. While more
    than `max_connections` are open, requests get 503. The server needs no threads to stop.
    """

    started: bool
    force_exit: bool

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        service: Service,
        *,
        on_listening: OnListening,
        stop_times: StopTimes = DEFAULT_STOP_TIMES,
        max_connections: int = MAX_CONNECTIONS,
        housekeeping: Callable[[], object] = lambda: None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(_config(app, max_connections, tls))
        self._socket, self._service = listener, service
        self._on_listening, self._stop_times = on_listening, stop_times
        self._housekeeping, self._housekeeping_at = housekeeping, 0.0
        self._stop_at = math.inf

    def run_until_stopped(self) -> None:
        """Listens, and serves until `stop`, SIGTERM or SIGINT (on the main thread), or a failure of the service.

        Call it when everything is verified and loaded. A second SIGINT ends the wait for running requests.

        Raises:
            SpecError: another process has taken the address since `bind`.
        """
        self.run(sockets=[self._socket])

    def stop(self) -> None:
        """Ends `run_until_stopped` as SIGINT does. Returns at once."""
        self.handle_exit(signal.SIGINT, None)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Part of uvicorn's life. Signals stay ignored afterwards, since the process ends once the server is at rest."""
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
        """Begins to drain. Unlike uvicorn's handler, it does not raise the signal again in the end."""
        del frame
        self._service.begin_drain()
        is_second = self._stop_at < math.inf
        has_delay = sig == signal.SIGTERM and not is_second
        self._stop_at = time.monotonic() + (self._stop_times.delay if has_delay else 0)
        self.force_exit = self.force_exit or (is_second and sig == signal.SIGINT)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Part of uvicorn's life."""
        url = url_of(self._socket, has_tls=self.config.ssl is not None)
        try:
            await super().startup(sockets)
        except OSError as error:
            raise refused(url, error) from error
        self._on_listening(url)

    @property
    def num_connections(self) -> int:
        """How many connections are open. Any thread may ask."""
        return len(self.server_state.connections)

    async def on_tick(self, counter: int) -> bool:
        """Part of uvicorn's life: returns whether to stop listening."""
        now = time.monotonic()
        if now >= self._housekeeping_at:
            self._housekeeping_at = now + _HOUSEKEEPING_SECONDS
            self._housekeeping()
        return await super().on_tick(counter) or now >= self._stop_at or self._service.has_failed()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Part of uvicorn's life: closes the socket, lets requests end, aborts the others, ends the service."""
        for server in self.servers:
            server.close()
        if not await self._until(self._service.has_drained, self._stop_times.drain):
            logger.warning("requests still ran after %g s and are aborted", self._stop_times.drain)
        if not await self._until(self._service.has_ended, self._stop_times.flush, is_hurried=False):
            logger.warning("the engine did not end within %g s", self._stop_times.flush)
        await self._until(lambda: not self.server_state.tasks, self._stop_times.flush)
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await self._until(lambda: not self.server_state.connections, _GOODBYE_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # The client does not read, has not sent its whole request, or ends no TLS.
        await super().shutdown(sockets)

    async def _until(self, condition: Callable[[], bool], seconds: float, *, is_hurried: bool = True) -> bool:
        """Waits at most `seconds` for `condition`, and returns whether it holds.

        With `is_hurried`, the wait ends early once `force_exit` is set. Pass False to wait for the current step: a process
        that ends in the middle of a step would crash.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if (is_hurried and self.force_exit) or time.monotonic() >= deadline:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return True


def _config(app: ASGIApp, max_connections: int, tls: ssl.SSLContext | None) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http="h11",
        loop="asyncio",
        lifespan="off",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=max_connections + 1,  # A request's own connection counts, too.
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
    )
    config.load()
    config.ssl = tls  # Its files were read at the beginning of the start, when mistakes should show.
    return config


# Binding


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket bound to `host` (name or address) and `port` (0: any free one) that does not listen yet.

    Raises:
        SpecError: the address is in use, belongs to another machine, or is not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise refused(f"{host}:{port}", error) from error
    return listener


@contextmanager
def socket_file(path: Path) -> Iterator[socket.socket]:
    """Yields a socket bound to the file `path` that does not listen yet, and removes the file in the end.

    Users who may write to the file may connect; the process's umask decides who these are. A socket file on which nobody
    listens is replaced: it is a leftover, or belongs to a server that is still starting.

    Raises:
        SpecError: another server listens there, the file is not a socket, or it cannot be created.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            if _is_left_over(path):
                path.unlink()
            listener.bind(os.fspath(path))
            bound = path.lstat()
        except OSError as error:
            raise refused(str(path), error) from error
        try:
            yield listener
        finally:
            with suppress(OSError):
                if os.path.samestat(path.lstat(), bound):
                    path.unlink()


def refused(where: str, error: Exception) -> SpecError:
    """Returns the error for an address or a path that the system refuses."""
    reason = getattr(error, "strerror", None) or error
    return SpecError(
        where, f"cannot be listened on: {reason}", "choose another with --host and --port, or --uds"
    )


def url_of(listener: socket.socket, *, has_tls: bool = False) -> str:
    """Returns where clients find `listener`: ``http://127.0.0.1:8000``, ``https://[::1]:8000``, ``unix:/run/a.sock``."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{'https' if has_tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _is_left_over(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # Connecting to a server with a full backlog would block.
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return path.is_socket() and not path.is_symlink()
        except OSError:  # It is not there, or a server has a full backlog.
            pass
    return False
