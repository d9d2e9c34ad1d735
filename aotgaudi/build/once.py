"""Builds a unit or traces a program once, however many builders want it: the lock, and a second look.

Who holds the unit's lock looks its record up again, works only where there is none, and records before letting go.
So one of many compiles, and a builder that dies takes its lock with it. The lock is the kernel's; where a file system
has none, two may compile, and the first record stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from aotgaudi.build.records import ProgramRow, UnitRow, read_programs, read_units, record
from aotgaudi.build.worker import CompileJob, TraceJob, run_compile, run_trace
from aotgaudi.store.store import Store

Job = Union[TraceJob, CompileJob]
Row = Union[ProgramRow, UnitRow]


@dataclass(frozen=True)
class Built:
    """The row that is recorded now. `is_new`: this job made it, and no other builder."""

    row: Row
    is_new: bool


@dataclass(frozen=True)
class Busy:
    """Another builder is at work on it."""


def key_of(job: Job) -> str:
    """Returns the key that the result of `job` is recorded for."""
    return job.key.hex if isinstance(job, TraceJob) else job.key


def find_row(store: Store, job: Job) -> Row | None:
    """Returns what is recorded for `job`, if that is intact."""
    key = key_of(job)
    rows = read_programs(store, (key,)) if isinstance(job, TraceJob) else read_units(store, (key,))
    return rows.get(key)


def build_once(job: Job) -> Built | Busy:
    """In a worker: does `job` and records the result, unless another builder has, or is at it.

    Raises as `run_trace` and `run_compile` do.
    """
    store = Store(job.store_root, job.lower)
    with store.try_unit_lock(key_of(job)) as is_mine:
        if not is_mine:
            return Busy()
        found = find_row(store, job)
        if found is not None:
            return Built(found, is_new=False)
        row = run_trace(job) if isinstance(job, TraceJob) else run_compile(job)
        record(store, key_of(job), row)
        return Built(find_row(store, job) or row, is_new=True)


def is_busy(store: Store, job: Job) -> bool:
    """Whether another builder holds the lock of `job` at this moment."""
    with store.try_unit_lock(key_of(job)) as is_free:
        return not is_free
