"""Chooses how many threads compute, and bounds how long waiting threads spin.

A matrix product is done when its slowest thread is done. If another process keeps a core busy, a thread on that core holds
up all the others. `choose_threads` therefore leaves busy cores out, and `bound_spinning` keeps waiting threads from burning
cores.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from aotgaudi.machine import available_cores, lines_of

_SAMPLES = 7
_SAMPLE_SECONDS = 0.002
_RUNNING = "procs_running"


@dataclass(frozen=True, slots=True)
class Threads:
    """How many threads compute matrix products, and why. Its text is the line for the log."""

    num: int
    why: str

    def __str__(self) -> str:
        return f"matrix products use {self.num} {'thread' if self.num == 1 else 'threads'}: {self.why}"


def choose_threads(environ: Mapping[str, str], children: Iterable[int] = ()) -> Threads:
    """Returns the number of threads: ``OMP_NUM_THREADS``, else one for each free core that we may use.

    Processes with the ids `children` do not count as keeping a core busy.
    """
    given = environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return Threads(int(given), "OMP_NUM_THREADS")
    cores, others = available_cores(), num_running_elsewhere(children)
    free = (os.cpu_count() or cores) - (others or 0)
    if free >= cores:
        return Threads(cores, "one for each core that this process may use")
    busy = f"{others} other {'task keeps' if others == 1 else 'tasks keep'} cores busy"
    return Threads(
        max(1, free), f"{busy}, of {cores} that this process may use (OMP_NUM_THREADS=N overrides)"
    )


def num_running_elsewhere(children: Iterable[int] = (), root: Path = Path("/")) -> int | None:
    """Returns how many tasks run on this machine, without this thread and those of `children`; None if unknown.

    Takes the median over a few milliseconds. Call it while this process runs no other thread.
    """
    folders = [root / "proc" / str(child) / "task" for child in children]
    counts = []
    for _ in range(_SAMPLES):
        rows = (line.split() for line in lines_of(root / "proc/stat"))
        found = next((row[1] for row in rows if len(row) == 2 and row[0] == _RUNNING), "")
        if not found.isdigit():
            return None
        counts.append(int(found) - 1 - sum(map(_num_running, folders)))
        time.sleep(_SAMPLE_SECONDS)
    return max(0, sorted(counts)[len(counts) // 2])


def _num_running(tasks: Path) -> int:
    """Returns how many threads of a process run or wait for a core. `tasks` is its folder ``task`` in ``/proc``."""
    stats = (" ".join(lines_of(task / "stat")) for task in tasks.glob("*"))
    return sum(stat.rpartition(")")[2].split()[:1] == ["R"] for stat in stats)


def bound_spinning(environ: MutableMapping[str, str]) -> None:
    """Bounds how long OpenMP's threads spin for work, unless the user has set it. Call it before libgomp is loaded.

    With the default, a second busy process on the same cores costs hundreds of milliseconds a step. A thousand turns cost
    2 ms of a decode step on an idle machine (docs/benchmarks.md).
    """
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", "1000")
