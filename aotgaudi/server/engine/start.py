"""Starts, awaits and ends the engine's process.

Imports little, so that the API server can start the engine first of all.
"""

from __future__ import annotations

import signal
import socket
import subprocess
from typing import TYPE_CHECKING, Any

from aotgaudi.child import spawn
from aotgaudi.errors import AotGaudiError
from aotgaudi.phases import uptime

if TYPE_CHECKING:
    from aotgaudi.bundle.model_directory import ModelDirectory
    from aotgaudi.server.engine.channel import Begin, Running

_END_SECONDS = 10.0


class EngineProcess:
    """The running engine process. A context manager, which ends it. Use it on one thread only.

    Call `begin`, `opened` and `running` once each, in this order; they block. After that, an `EngineClient` owns
    `connection`.
    """

    def __init__(self, seconds: float) -> None:
        """Starts the process and returns at once. The API server started `seconds` ago."""
        began = uptime() - seconds
        self._process, self.connection = spawn(
            "aotgaudi.server.engine.main", str(began), kind=socket.SOCK_STREAM
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def begin(self, begin: Begin) -> None:
        """Tells the process to start the engine."""
        from aotgaudi.server.engine.channel import Channel, ChannelClosedError

        self._channel = Channel(self.connection)
        try:
            self._channel.send(begin)
        except ChannelClosedError:
            raise self.ended() from None

    def opened(self) -> ModelDirectory:
        """Waits for the model directory to serve, and returns it. Raises what `aotgaudi.llm.start.start` raises."""
        directory: ModelDirectory = self._next().directory
        return directory

    def running(self) -> Running:
        """Waits until the engine runs, and returns its report. Raises what `aotgaudi.llm.start.start` raises."""
        running: Running = self._next()
        return running

    def ended(self) -> AotGaudiError:
        """Returns the error for a process that has closed its end of the connection."""
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return AotGaudiError("the engine's process says no more")
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return AotGaudiError(f"the engine's process has ended ({how})")

    def close(self) -> None:
        """Kills the process, whatever it is doing. Idempotent."""
        self.connection.close()
        self._process.kill()
        self._process.wait()

    def _next(self) -> Any:
        from aotgaudi.server.engine.channel import ChannelClosedError, Failed

        try:
            message = self._channel.receive()
        except ChannelClosedError:
            raise self.ended() from None
        if isinstance(message, Failed):
            raise message.error
        return message

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
