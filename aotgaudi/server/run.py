"""Runs the application on a socket until a signal says to stop."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from aotgaudi.errors import SpecError
from aotgaudi.server.service import DEFAULT_DRAIN_TIMEOUT_SECONDS

_BACKLOG = 2048
_MAX_PORT = 65535

OnListening = Callable[[str, int], None]
"""Called once requests are answered, with the address and the port (the real one, where 0 was asked for)."""


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to `host` (name or address) and `port` (0: any free one) that does not listen yet.

    Raises:
        SpecError: the address cannot be had: in use, not of this machine, not allowed.
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


class _Server(uvicorn.Server):  # type: ignore[misc,unused-ignore]
    """Tells when it listens and when it is told to stop; a stop by signal is an ordinary end."""

    started: bool
    should_exit: bool
    force_exit: bool

    def __init__(
        self, config: uvicorn.Config, on_started: Callable[[], None], on_stop: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._on_started, self._on_stop = on_started, on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Not uvicorn's own, which dies of the signal after a graceful end."""
        del frame
        self._on_stop()
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True


class HttpServer:
    """An application on a bound socket. `run` blocks; `stop` may be called on any thread.

    `on_listening` is called once requests are answered; `on_stop` when the server is told to stop
    (`Service.begin_drain`, say). Requests that run then get `drain_timeout_seconds` to end.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        *,
        on_listening: OnListening,
        on_stop: Callable[[], None] = lambda: None,
        drain_timeout_seconds: float = DEFAULT_DRAIN_TIMEOUT_SECONDS,
    ) -> None:
        host, port = listener.getsockname()[:2]
        self._listener = listener
        config = _config(app, drain_timeout_seconds)
        self._server = _Server(config, on_started=lambda: on_listening(host, port), on_stop=on_stop)

    def run(self) -> None:
        """Listens, and serves until told to stop: by `stop`, or, on the main thread, by SIGTERM or SIGINT.

        Raises:
            SpecError: the address is in use by now.
        """
        try:
            self._listener.listen(_BACKLOG)
        except OSError as error:
            host, port = self._listener.getsockname()[:2]
            self._listener.close()
            raise _refused(f"{host}:{port}", error) from error
        self._server.run(sockets=[self._listener])

    def stop(self) -> None:
        """Ends `run` as SIGTERM does. Returns at once."""
        self._server.handle_exit(signal.SIGTERM, None)


def serve_forever(
    app: ASGIApp,
    host: str,
    port: int,
    on_listening: OnListening,
    *,
    listener: socket.socket | None = None,
    on_stop: Callable[[], None] = lambda: None,
    drain_timeout_seconds: float = DEFAULT_DRAIN_TIMEOUT_SECONDS,
) -> None:
    """Serves `app` until SIGTERM or SIGINT, then lets running requests end, and returns.

    Call it on the main thread when everything is verified and loaded: it starts to listen. `listener` is a
    socket from `bind`, made earlier so that a port in use is noticed before minutes of loading; None binds
    `host` and `port` now. A second SIGINT gives running requests no more time.

    Raises:
        SpecError: the address cannot be listened on.
    """
    HttpServer(
        app,
        bind(host, port) if listener is None else listener,
        on_listening=on_listening,
        on_stop=on_stop,
        drain_timeout_seconds=drain_timeout_seconds,
    ).run()


def _config(app: ASGIApp, drain_timeout_seconds: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="on",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=max(1, round(drain_timeout_seconds)),
    )
