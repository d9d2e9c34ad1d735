"""Which phases a piece of work goes through, and when each begins and ends. Standard library only."""

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
    """`begin` and `end` are in seconds since the whole began."""

    name: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin


class Phases:
    """Times the phases of one piece of work, which may overlap. Any thread.

    A phase that fails is not kept.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """`clock` gives the seconds since the whole began; None: it begins now."""
        began = time.perf_counter()
        self.clock = clock or (lambda: time.perf_counter() - began)
        self._done: list[Phase] = []
        self._lock = threading.Lock()

    @property
    def done(self) -> tuple[Phase, ...]:
        """The phases that have ended, in the order of their beginnings."""
        with self._lock:
            return tuple(sorted(self._done, key=lambda phase: (phase.begin, phase.end)))

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Times what runs inside."""
        begin = self.clock()
        yield
        self.add(name, begin)

    def keep(self, phases: Iterable[Phase]) -> None:
        """Adds phases that were timed elsewhere, by the same clock."""
        with self._lock:
            self._done += phases

    def add(self, name: str, begin: float) -> None:
        """Adds a phase that began at `begin` and ends now."""
        self.keep([Phase(name, begin, self.clock())])


def listed(phases: Iterable[Phase]) -> str:
    """Returns phases on one line: ``import 0.12-0.50, verify 0.31-0.48``, in seconds."""
    return ", ".join(f"{phase.name} {phase.begin:.2f}-{phase.end:.2f}" for phase in phases)


def since_process_start() -> Callable[[], float]:
    """Returns a clock: the seconds since the kernel started this process (whose start is known to 10 ms)."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return since(int(fields[19]) / os.sysconf("SC_CLK_TCK"))


def since(began: float) -> Callable[[], float]:
    """Returns a clock: the seconds since `began`, which is in seconds of the machine's uptime, as all processes count it."""
    return lambda: max(0.0, uptime() - began)


def uptime() -> float:
    """Returns how long the machine has been up, in seconds."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
