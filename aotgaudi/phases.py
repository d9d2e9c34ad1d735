"""Times the phases of a piece of work. Standard library only."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Phase:
    """One timed phase. `begin` and `end` are in seconds since the work began."""

    name: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin


class Phases:
    """Times the phases of one piece of work, which may overlap. Thread-safe.

    A phase that raises is not kept.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """`clock` returns the seconds since the work began. None means that it begins now."""
        began = time.perf_counter()
        self.clock = clock or (lambda: time.perf_counter() - began)
        self._done: list[Phase] = []
        self._lock = threading.Lock()

    @property
    def done(self) -> tuple[Phase, ...]:
        """The finished phases, in the order in which they began."""
        with self._lock:
            return tuple(sorted(self._done, key=lambda phase: (phase.begin, phase.end)))

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Times the block."""
        begin = self.clock()
        yield
        self.add(name, begin)

    def keep(self, phases: Iterable[Phase]) -> None:
        """Adds phases that were timed elsewhere with the same clock."""
        with self._lock:
            self._done += phases

    def add(self, name: str, begin: float) -> None:
        """Adds a phase that began at `begin` and ends now."""
        self.keep([Phase(name, begin, self.clock())])


def listed(phases: Iterable[Phase]) -> str:
    """Returns phases on one line, in seconds: ``import 0.12-0.50, verify 0.31-0.48``."""
    return ", ".join(f"{phase.name} {phase.begin:.2f}-{phase.end:.2f}" for phase in phases)


def since_process_start() -> Callable[[], float]:
    """Returns a clock of the seconds since the kernel started this process (to 10 ms)."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return since(int(fields[19]) / os.sysconf("SC_CLK_TCK"))


def since(began: float) -> Callable[[], float]:
    """Returns a clock of the seconds since `began`, which is a value of `uptime`."""
    return lambda: max(0.0, uptime() - began)


def uptime() -> float:
    """Returns the machine's uptime in seconds. All processes read the same clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
