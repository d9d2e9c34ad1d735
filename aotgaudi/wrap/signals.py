"""The signals that the supervisor passes on and that wake it up, even as PID 1, where they have no default action."""

from __future__ import annotations

import select
import signal
import socket
from contextlib import suppress
from types import FrameType

FORWARDED = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGTERM, signal.SIGCONT),
)
ENDING = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM})
"""Signals that ask us to end. Before there is a server, they end us."""


class Signals:
    """Catches signals. A context manager for the main thread.

    Until `hold` is called there is no server to pass signals on to, and a signal that asks to end raises SystemExit(128 +
    n).
    """

    def __init__(self) -> None:
        self._held: list[int] | None = None
        self._asked_to_end = 0
        self._reader, self._writer = socket.socketpair()

    def __enter__(self) -> Signals:
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._before = {number: signal.signal(number, self._catch) for number in (*FORWARDED, signal.SIGCHLD)}
        self._before_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *raised: object) -> None:
        signal.set_wakeup_fd(self._before_wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._reader.close()
        self._writer.close()

    def hold(self) -> None:
        """Collects signals from now on, until `take` is called.

        Raises SystemExit if an earlier signal asked to end, because Python drops an exception that interrupts a finalizer.
        """
        self._held = []
        if self._asked_to_end:
            raise SystemExit(128 + self._asked_to_end)

    def take(self) -> list[int]:
        """Returns the signals since the last call, in order."""
        taken: list[int] = []
        while self._held:
            taken.append(self._held.pop(0))
        return taken

    def wait(self, seconds: float) -> None:
        """Waits at most `seconds` for a signal or for a change of a child."""
        readable, _, _ = select.select([self._reader], [], [], seconds)
        if readable:
            with suppress(BlockingIOError):
                self._reader.recv(4096)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGCHLD:
            return
        if self._held is not None:
            self._held.append(number)
        elif number in ENDING:
            self._asked_to_end = number
            raise SystemExit(128 + number)
