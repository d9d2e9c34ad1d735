"""All processes of a wrapped server, wherever they have gone, and the reaper that ends them if we are killed.

The reaper is a small process of ours. ``main`` gets the arguments LEADER MARK SECONDS, and a pipe from us as its standard
input. A byte on the pipe means that all is well and the reaper may go. If the pipe closes without a byte, we have been
killed, and the reaper ends the whole tree. While it lives it holds the sandbox's lock, so that nobody takes the sandbox of a
server that still runs. Source: proc(5).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from aotgaudi.linux import become_subreaper

GOODBYE = b"."
"""The byte that tells the reaper to go."""

_POLL_SECONDS = 0.02
_LEFTOVER_SECONDS = 2.0
_KILL_SECONDS = 10.0
"""How long killed processes may take to go. A process that waits for a device cannot even die."""
_GONE = frozenset({psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD})


@dataclass(frozen=True)
class ProcessTree:
    """The processes of one wrapped server.

    A process belongs to it if it is in the leader's session, below the leader, or has the mark in its environment.

    Attributes:
        leader: The process that was started; None if it is long gone.
        mark: ``NAME=value``, as in the environment of the server's processes.
        adopter: A process that adopts the server's orphans (a subreaper, or PID 1), or 0. Its children belong to the server,
            except `strangers`.
        strangers: Process ids that belong to somebody else.
    """

    leader: int | None
    mark: str
    adopter: int = 0
    strangers: frozenset[int] = frozenset()
    _unmarked: dict[int, float] = field(default_factory=dict, repr=False, compare=False)
    """Process id -> creation time, for processes without the mark. A process cannot get the mark later, so its environment
    is read only once, which matters on a machine with thousands of processes."""

    def living(self) -> frozenset[int]:
        """Returns the ids of the tree's living processes."""
        table = processes()
        return frozenset(
            process.pid
            for process in table.values()
            if process.info["status"] not in _GONE
            and process.pid not in self.strangers
            and self._has(process, table)
        )

    def _has(self, process: psutil.Process, table: Mapping[int, psutil.Process]) -> bool:
        if process.pid in (os.getpid(), self.adopter):
            return False
        return (
            _session(process.pid) == self.leader or self._is_below(process, table) or self._is_marked(process)
        )

    def _is_marked(self, process: psutil.Process) -> bool:
        if self._unmarked.get(process.pid) == process.info["create_time"]:
            return False
        try:
            environment = process.environ()
        except (psutil.Error, OSError):  # It belongs to another user, or has gone.
            return False
        name, _, value = self.mark.partition("=")
        if environment.get(name) == value:
            return True
        if environment:  # It is empty while a program is being replaced.
            self._unmarked[process.pid] = process.info["create_time"]
        return False

    def _is_below(self, process: psutil.Process, table: Mapping[int, psutil.Process]) -> bool:
        seen = set[int]()
        while process.pid not in seen:
            seen.add(process.pid)
            parent = process.info["ppid"]
            if process.pid in self.strangers:
                return False
            if process.pid == self.leader or (self.adopter and parent == self.adopter):
                return True
            if parent not in table:
                return False
            process = table[parent]
        return False

    def signal(self, number: int) -> None:
        """Sends a signal to each living process of the tree."""
        for pid in self.living():
            send(pid, number)

    def end(self, seconds: float, on_wait: Callable[[], object] = lambda: None) -> None:
        """Ends the whole tree.

        The leader gets SIGTERM and has `seconds` to end. The processes that it leaves then get SIGTERM and at most two
        seconds. Everything that still lives is killed. Meanwhile `on_wait` is called repeatedly, to reap children.
        """
        if self.leader is not None:
            send(self.leader, signal.SIGTERM)
        living = self._wait(seconds, on_wait, lambda living: self.leader not in living)
        if living and self.leader not in living:
            self.signal(signal.SIGTERM)
            living = self._wait(min(_LEFTOVER_SECONDS, seconds), on_wait)
        deadline = time.monotonic() + _KILL_SECONDS
        while living and time.monotonic() < deadline:
            self.signal(signal.SIGKILL)
            living = self._wait(_POLL_SECONDS, on_wait)

    def _wait(
        self,
        seconds: float,
        on_wait: Callable[[], object],
        is_done: Callable[[frozenset[int]], bool] = lambda living: not living,
    ) -> frozenset[int]:
        """Waits at most `seconds` until `is_done`. Returns the processes that live."""
        deadline = time.monotonic() + seconds
        while True:
            on_wait()
            living = self.living()
            if is_done(living) or time.monotonic() >= deadline:
                return living
            time.sleep(_POLL_SECONDS)


def processes() -> dict[int, psutil.Process]:
    """Returns every process that we can see, by id, with its ``info``: parent, status and creation time."""
    return {process.pid: process for process in psutil.process_iter(["ppid", "status", "create_time"])}


def send(pid: int, number: int) -> None:
    """Sends a signal. Does nothing if the process has gone or is not ours."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def adopt_orphans() -> None:
    """Makes this process adopt the orphans of all processes below it, like PID 1."""
    with suppress(OSError):  # A sandbox may forbid it.
        become_subreaper()


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:  # It has gone.
        return -1


def main() -> None:
    """Runs the reaper: waits until its parent goes, and ends the tree unless the parent said goodbye."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    leader, mark, seconds = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    if os.read(0, 1) != GOODBYE:
        ProcessTree(leader, mark).end(seconds)
