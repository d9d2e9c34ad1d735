"""The processes of a guest, wherever they have gone: in its session, with its mark in their environment, or below it.

Standard library only: the keeper and the entrance run without anything else. Source: proc(5), prctl(2).
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

_PROC = Path("/proc")
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.02
_LEFTOVER_SECONDS = 2.0
_KILL_SECONDS = 10.0
"""How long what was killed may take to go: a process that waits for a device cannot even die."""


@dataclass(frozen=True)
class Process:
    """One row of the system's table; `session` and `parent` are process ids, `started` tells two of one id apart."""

    pid: int
    parent: int
    session: int
    started: int
    is_zombie: bool


@dataclass(frozen=True)
class ProcessTree:
    """Who belongs to a guest.

    Attributes:
        leader: The process that was started, None where it is long gone; its session and everything below it belong to it.
        mark: ``NAME=value``, as it stands in the environment of the guest's processes.
        adopter: A process that adopts what the guest has orphaned (a subreaper, or PID 1), or 0; its children belong to
            the guest, but for those in `strangers`.
        strangers: Process ids that belong to somebody else.
    """

    leader: int | None
    mark: str
    adopter: int = 0
    strangers: frozenset[int] = frozenset()
    _unmarked: dict[int, int] = field(default_factory=dict, repr=False, compare=False)
    """Process id -> when it was started, of those without the mark. Who has no mark gets none: only the guest's have it to
    give. So an environment is read once, which matters where there are thousands of processes."""

    def living(self) -> frozenset[int]:
        """Returns the ids of its processes that live."""
        table = {process.pid: process for process in all_processes()}
        found = {
            process.pid
            for process in table.values()
            if not process.is_zombie and process.pid not in self.strangers and self._has(process, table)
        }
        return frozenset(found)

    def _has(self, process: Process, table: dict[int, Process]) -> bool:
        if process.pid in (os.getpid(), self.adopter):
            return False
        return process.session == self.leader or self._is_below(process, table) or self._is_marked(process)

    def _is_marked(self, process: Process) -> bool:
        if self._unmarked.get(process.pid) == process.started:
            return False
        environment = _environment(process.pid)
        if self.mark.encode() in environment:
            return True
        if any(environment):  # While a program is being replaced there is none.
            self._unmarked[process.pid] = process.started
        return False

    def _is_below(self, process: Process, table: dict[int, Process]) -> bool:
        seen = set()
        while process.pid not in seen:
            seen.add(process.pid)
            if process.pid in self.strangers:
                return False
            if process.pid == self.leader or (self.adopter and process.parent == self.adopter):
                return True
            if process.parent not in table:
                return False
            process = table[process.parent]
        return False

    def signal(self, number: int) -> None:
        """Sends a signal to each of its processes that lives."""
        for pid in self.living():
            send(pid, number)

    def end(self, grace_seconds: float, on_wait: Callable[[], object] = lambda: None) -> bool:
        """Has all of it end. Returns whether something had to be killed.

        The leader gets SIGTERM, and `grace_seconds`; what it leaves behind gets SIGTERM, too, and two of them. What lives
        then is killed. `on_wait` is called again and again meanwhile; it is where children are reaped.
        """
        if self.leader is not None:
            send(self.leader, signal.SIGTERM)
        living = self._wait(grace_seconds, on_wait, lambda living: self.leader not in living)
        if living and self.leader not in living:
            self.signal(signal.SIGTERM)
            living = self._wait(min(_LEFTOVER_SECONDS, grace_seconds), on_wait)
        was_killed, deadline = bool(living), time.monotonic() + _KILL_SECONDS
        while living and time.monotonic() < deadline:
            self.signal(signal.SIGKILL)
            living = self._wait(_POLL_SECONDS, on_wait)
        return was_killed

    def _wait(
        self,
        seconds: float,
        on_wait: Callable[[], object],
        is_done: Callable[[frozenset[int]], bool] = lambda living: not living,
    ) -> frozenset[int]:
        """Waits until `is_done`, but not longer than that; returns who lives."""
        deadline = time.monotonic() + seconds
        while True:
            on_wait()
            living = self.living()
            if is_done(living) or time.monotonic() >= deadline:
                return living
            time.sleep(_POLL_SECONDS)


def all_processes() -> Iterator[Process]:
    """Yields every process that can be seen."""
    for name in os.listdir(_PROC):
        if name.isdigit():
            process = _process(int(name))
            if process is not None:
                yield process


def send(pid: int, number: int) -> None:
    """Sends a signal; a process that has gone, or that is not ours, is left alone."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def adopt_orphans() -> None:
    """Makes this process the parent of whatever the processes below it orphan, as PID 1 is."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _process(pid: int) -> Process | None:
    try:
        text = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    return Process(pid, int(fields[1]), int(fields[3]), int(fields[19]), fields[0] in (b"Z", b"X"))


def _environment(pid: int) -> list[bytes]:
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # Somebody else's.
        return []
