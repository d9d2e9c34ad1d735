"""The messages between the API server and the engine process, over a pair of sockets.

::

    message            length (unsigned 64-bit integer of this machine), pickled value
    server to engine   `Begin`; once it runs `Add`, `Abort`, `Ask`, `Stop`
    engine to server   `Opened`; `Running`.
                       Then `Told`, about one step or several, and `Status`, in answer to `Ask`.
                       Either of the first two may be replaced by `Failed`, which is the last message

Both ends are the same program, so pickle is safe here. Neither parses what clients send; the preprocessor pool does.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from aotgaudi.bundle.model_directory import ModelDirectory
from aotgaudi.child import travels
from aotgaudi.engine.admission import RequestRules
from aotgaudi.engine.output import Event
from aotgaudi.engine.request import NewRequest
from aotgaudi.engine.stats import EngineStats
from aotgaudi.errors import AotGaudiError
from aotgaudi.llm.running import ModelOptions, Warmth
from aotgaudi.phases import Phase
from aotgaudi.runtime.guard import Seccomp
from aotgaudi.server.options import LogFormat

_LENGTH = struct.Struct("=Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Says what to run, how to guard it, and how to write the log."""

    options: ModelOptions
    seccomp: Seccomp
    log_format: LogFormat


@dataclass(frozen=True, slots=True)
class Opened:
    """The bundle looks usable (its files are not hashed yet), and this is the model directory to serve with it."""

    directory: ModelDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The engine runs, and its guard is armed. The fields are those of `aotgaudi.llm.running.RunningModel`."""

    rules: RequestRules
    defaults: Mapping[str, Any]
    manifest_id: str
    binding: str
    status: Status
    phases: tuple[Phase, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """The start has failed."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Add:
    """See `aotgaudi.engine.loop.Engine.add`."""

    requests: tuple[NewRequest, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends requests early."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """Asks for a `Status`."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Aborts all requests and ends the process."""


@dataclass(frozen=True, slots=True)
class Told:
    """Results of steps: events, kind of entry and seconds of each step, and texts of tokens that were not sent before."""

    events: tuple[Event, ...]
    steps: tuple[tuple[str, float], ...] = ()
    texts: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Status:
    """A snapshot of the engine and of its guard."""

    stats: EngineStats
    warmth: Warmth


class ChannelClosedError(ConnectionError):
    """The other process has ended. Stays in this package."""


def sendable(error: Exception) -> Exception:
    """Returns `error`, or an AotGaudiError with its message if `error` cannot be sent to another process."""
    return error if travels(error) else AotGaudiError(str(error))


def frame(message: object) -> bytes:
    """Returns the bytes of a message."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Assembles messages from the bytes that arrive."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yields the messages that `data` completes."""
        self._data += data
        start, size = 0, len(self._data)
        while size - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data, start)
            end = start + _LENGTH.size + length
            if size < end:
                break
            yield pickle.loads(memoryview(self._data)[start + _LENGTH.size : end])  # noqa: S301 - our own process's
            start = end
        del self._data[:start]


class Channel:
    """One end of the connection, whose calls block. Any thread may send, one may receive."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        """Sends a message, and waits until it is in the socket's buffer. Raises ChannelClosedError."""
        data = frame(message)
        try:
            with self._sending:
                self.connection.sendall(data)
        except OSError as error:
            raise ChannelClosedError from error

    def wait(self, seconds: float) -> bool:
        """Waits up to `seconds`. Returns whether there is something to receive."""
        waiting = select.poll()
        waiting.register(self.connection, select.POLLIN)
        return bool(waiting.poll(seconds * 1000))

    def receive(self) -> Any:
        """Waits for the next message. Raises ChannelClosedError."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return pickle.loads(self._exactly(length))  # noqa: S301 - our own process's

    def _exactly(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:  # A signal may cut it short.
            try:
                received = self.connection.recv(num_bytes - len(data), socket.MSG_WAITALL)
            except ConnectionError as error:
                raise ChannelClosedError from error
            if not received:
                raise ChannelClosedError
            data += received
        return data
