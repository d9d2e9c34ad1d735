"""Takes connections, so many at once; whoever keeps the server waiting the longest makes room for the next.

asyncio's own loop tries to accept as often as the backlog is long and logs each failure with a traceback; so where
descriptors are scarce it does nothing else. And what costs is not to accept a connection but to serve it. So all that
have come are accepted, and then served some at a time, in the order of `Arrivals`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Callable

import uvicorn
from uvicorn.server import ServerState

from aotgaudi.server.front.arrivals import Arrivals
from aotgaudi.server.front.connection import Connection
from aotgaudi.server.front.limits import REASONS, ConnectionLimits, Reason
from aotgaudi.server.front.pace import Pace
from aotgaudi.server.front.refusals import refusal
from aotgaudi.server.front.turnstile import Turnstile

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_MAX_ACCEPTED = 256
"""Connections accepted in one turn of the event loop: some 15 us each."""
_LEAST, _BATCH = 4, 16
"""Connections that begin to be served in one turn, 0.2 ms each."""
_MAX_BEYOND = 16
"""How many more than the limit there may be for a moment, and how many make room where nothing is left."""
_PAUSE_SECONDS = 0.1
_LOG_SECONDS = 10.0
_SEND_BUFFER_BYTES = 128 * 1024
"""What the kernel holds for a client that does not read; by default some megabytes."""
_RECEIVE_BUFFER_BYTES = 64 * 1024
"""And from one that sends much: the loop reads as many bytes of each client before any of them is looked at."""
_BUSY = refusal(503, "The server has as many connections as it takes", closes=True)


class Incidents:
    """What befalls connections: counted each time, logged now and then."""

    def __init__(self, count: Callable[[Reason], None], clock: Callable[[], float]) -> None:
        self._count, self._clock = count, clock
        self._untold: dict[Reason, tuple[int, str]] = {}
        self._told_at: dict[Reason, float] = {}

    def add(self, reason: Reason, peer: str) -> None:
        """Counts one; logs it if none of its kind was logged lately."""
        self._count(reason)
        self._untold[reason] = (self._untold.get(reason, (0, ""))[0] + 1, peer)
        self.tell()

    def tell(self) -> None:
        """Logs what was not logged yet, each kind once in a while."""
        now = self._clock()
        for reason in list(self._untold):
            if now - self._told_at.get(reason, -_LOG_SECONDS) < _LOG_SECONDS:
                continue
            num, peer = self._untold.pop(reason)
            self._told_at[reason] = now
            if reason != "idle":
                logger.warning("%d connection(s) %s; the last from %s", num, REASONS[reason], peer)


class Listener:
    """A listening socket and the connections that came through it. On the event loop only, `listen` excepted."""

    def __init__(
        self,
        listener: socket.socket,
        config: uvicorn.Config,
        state: ServerState,
        limits: ConnectionLimits,
        count: Callable[[Reason], None],
        is_full: Callable[[], bool],
    ) -> None:
        """`count` counts what befalls connections; `is_full`: see `Turnstile`."""
        self.limits, self.state = limits, state
        self._socket, self._config = listener, config
        self._waiting: dict[Connection, None] = {}
        """Whose clients keep us waiting; the longest since its last byte first."""
        self._opening: dict[Connection, asyncio.Task[None]] = {}
        """Taken, but not yet among `state.connections`."""
        self._arrivals = Arrivals()
        """Accepted, but not taken yet."""
        self._count, self._is_full = count, is_full
        self._loop: asyncio.AbstractEventLoop
        self.turnstile: Turnstile
        self._pace: Pace
        self._incidents: Incidents

    def listen(self) -> None:
        """Lets clients queue. Raises OSError."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        self._socket.setblocking(False)
        self._socket.listen(_BACKLOG)

    def start(self) -> None:
        """Takes connections from now on."""
        self._loop = asyncio.get_running_loop()
        self.turnstile = Turnstile(self._loop, self._is_full)
        self._pace = Pace(self._loop.time, _LEAST, _BATCH)
        self._incidents = Incidents(self._count, self._loop.time)
        self._loop.add_reader(self._socket, self._accept)
        self._sweeper = self._loop.call_later(self._sweep_seconds, self._sweep)

    def close(self) -> None:
        """Takes no more. Those that are open stay, and are still held to their limits."""
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def note(self, connection: Connection) -> None:
        """Part of `Watcher`."""
        self._opening.pop(connection, None)
        self._waiting.pop(connection, None)
        if connection.keeps_us_waiting:
            self._waiting[connection] = None

    def tell(self, reason: Reason, peer: str) -> None:
        """Part of `Watcher`."""
        self._incidents.add(reason, peer)

    @property
    def _sweep_seconds(self) -> float:
        limits = self.limits
        return min(limits.client_seconds, limits.idle_seconds, limits.linger_seconds, 10.0) / 10

    def _sweep(self) -> None:
        now = self._loop.time()
        for connection in list(self.state.connections):
            reason = connection.overdue(now)  # type: ignore[union-attr,unused-ignore]
            if reason is not None:
                connection.drop(reason)  # type: ignore[union-attr,unused-ignore]
        self._incidents.tell()
        self._sweeper = self._loop.call_later(self._sweep_seconds, self._sweep)

    @property
    def _num_taken(self) -> int:
        return len(self.state.connections) + len(self._opening)

    def _accept(self) -> None:
        if not self._arrivals:
            self._pace.start()
            self._loop.call_soon(self._take_some)
        for _ in range(_MAX_ACCEPTED):
            try:
                client, address = self._socket.accept()
            except ConnectionAbortedError:
                continue
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._pause(error)
                return
            client.setblocking(False)
            self._arrivals.add(client, str(address[0]))
            if self._num_taken + len(self._arrivals) >= self.limits.max_connections + _MAX_BEYOND:
                return

    def _take_some(self) -> None:
        """Takes some of those that have been accepted, and comes back for the others."""
        batch = self._pace.next()
        self._arrivals.look()
        for _ in range(min(batch, len(self._arrivals))):
            self._take(*self._arrivals.pop())
        if self._arrivals:
            self._loop.call_soon(self._take_some)

    def _pause(self, error: OSError) -> None:
        """No descriptor, or no memory: those that wait make room, and we try again a little later."""
        self.tell("no_resources", error.strerror or str(error))
        for _ in range(_MAX_BEYOND):
            self._evict()
        self._loop.remove_reader(self._socket)
        self._loop.call_later(_PAUSE_SECONDS, self._resume)

    def _resume(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket, self._accept)

    def _take(self, client: socket.socket, peer: str) -> None:
        if self._num_taken >= self.limits.max_connections and not self._evict():
            self.tell("refused", peer)
            _turn_away(client)
            return
        connection = Connection(self._config, self, self._loop)
        self._opening[connection] = self._loop.create_task(self._open(client, connection))

    def _evict(self) -> bool:
        for connection in itertools.islice(self._waiting, _MAX_BEYOND):
            if not connection.has_unread:
                del self._waiting[connection]
                connection.drop("evicted")
                return True
        return False

    async def _open(self, client: socket.socket, connection: Connection) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: connection, client)
        except OSError as error:
            del self._opening[connection]
            client.close()
            self.tell("no_resources", error.strerror or str(error))


def _turn_away(client: socket.socket) -> None:
    """Says that there is no room, as far as that goes without waiting."""
    with contextlib.closing(client), contextlib.suppress(OSError):
        client.setblocking(False)
        client.send(_BUSY)
        client.shutdown(socket.SHUT_WR)
        client.recv(1 << 16)  # What is left unread at the close would take the answer away from the client.
