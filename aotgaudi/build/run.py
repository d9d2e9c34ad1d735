"""The state of one run of a plan: what waits, what runs, what another builder does, and what came of it."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from aotgaudi.build.once import Built, Busy, Job, Row, find_row, is_busy, key_of
from aotgaudi.build.plan import SMALL_TRACE_SECONDS, TRACE_SECONDS, Plan
from aotgaudi.build.pool import Done, WorkerDiedError
from aotgaudi.build.records import ProgramRow, UnitRow, UnitSource, read_units
from aotgaudi.build.worker import CompileJob, LostTextError, TraceJob
from aotgaudi.errors import AotGaudiError, ManifestError, SpecError, StoreError
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.store.store import Store

ATTEMPTS = 2

_TRACE_COST = 1e9
"""Traces come first: only they tell which units there are, hence the total and a usable estimate."""

_LONGEST_SLUG = 160
"""Characters of a label in a file name, which may have 255."""


@dataclass(frozen=True)
class Progress:
    """Where a build is: jobs done and known so far, seconds left (estimate), and what is being done."""

    num_done: int
    num_total: int
    eta_seconds: float
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Failure:
    """A job that failed for good."""

    label: str
    message: str
    log_path: Path


@dataclass(frozen=True)
class _Attempt:
    job: Job
    number: int
    started: float = field(default_factory=time.monotonic)


class Run:
    """A queue by cost, what runs, and what came of it. `fatal`: what ends the run."""

    def __init__(self, store: Store, plan: Plan, spec: BuildSpec) -> None:
        self.compiled: list[UnitRow] = []
        self.failures: list[Failure] = []
        self.fatal: AotGaudiError | None = None
        self.num_traced = 0
        self._queue: list[tuple[float, int, _Attempt]] = []
        self._running: dict[int, _Attempt] = {}
        self._parked: list[_Attempt] = []
        self._num_done = self._num_known = 0
        self._order, self._tickets = itertools.count(), itertools.count()
        self._store, self._plan = store, plan
        self._unit_keys: set[str] = set(plan.units)
        self._origins: dict[str, TraceJob] = {}
        self._traced_again: set[str] = set()
        for state in plan.programs:
            trace = self._trace_job(state.key, state.entries[0], spec)
            if state.row is None:
                self._push(trace)
            else:
                self._push_units(state.row, trace)

    @property
    def num_queued(self) -> int:
        """Jobs that could start now."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Jobs under way here."""
        return len(self._running)

    @property
    def is_waiting(self) -> bool:
        """Whether there are jobs that other builders are at."""
        return bool(self._parked)

    def start_next(self, submit: Callable[[int, Job], None]) -> None:
        """Hands the costliest job to `submit`, with its ticket."""
        _, _, attempt = heapq.heappop(self._queue)
        ticket = next(self._tickets)
        self._running[ticket] = _Attempt(attempt.job, attempt.number)
        try:
            submit(ticket, attempt.job)
        except BaseException:
            del self._running[ticket]
            raise

    def settle(self, done: Done, *, is_stopping: bool) -> None:
        """Counts the result of a job, queues its second attempt, or reports it."""
        attempt = self._running.pop(done.ticket)
        if done.error is not None:
            self._failed(attempt, done.error, is_stopping)
        elif isinstance(done.result, Busy):
            self._parked.append(attempt)
        else:
            assert isinstance(done.result, Built)
            self._count(attempt.job, done.result.row, is_new=done.result.is_new)

    def look_at_others(self) -> None:
        """Takes the results of other builders, and takes over from those that left without one."""
        parked, self._parked = self._parked, []
        for attempt in parked:
            row = find_row(self._store, attempt.job)
            if row is not None:
                self._count(attempt.job, row, is_new=False)
            elif is_busy(self._store, attempt.job):
                self._parked.append(attempt)
            else:
                self._push(attempt.job, attempt.number, known=True)

    def progress(self, num_workers: int) -> Progress:
        """Where the run is."""
        now = time.monotonic()
        left = sum(self._seconds(attempt.job) for _, _, attempt in self._queue)
        left += sum(
            max(0.0, self._seconds(attempt.job) - (now - attempt.started))
            for attempt in self._running.values()
        )
        labels = tuple(attempt.job.label for attempt in (*self._running.values(), *self._parked))
        return Progress(self._num_done, self._num_known, left / max(1, num_workers), labels)

    def _count(self, job: Job, row: Row, *, is_new: bool) -> None:
        self._num_done += 1
        if isinstance(job, TraceJob) and isinstance(row, ProgramRow):
            self.num_traced += is_new
            self._push_units(row, job)
        elif isinstance(row, UnitRow) and is_new:
            self.compiled.append(row)

    def _failed(self, attempt: _Attempt, error: Exception, is_stopping: bool) -> None:
        job = attempt.job
        if _is_fatal(error):
            self.fatal = self.fatal or error
            self._push(job, attempt.number, known=True)
        elif is_stopping and isinstance(error, WorkerDiedError):
            self._push(job, attempt.number, known=True)  # The signal that stops us has reached it, too.
        elif isinstance(error, LostTextError) and key_of(job) in self._origins.keys() - self._traced_again:
            self._trace_again(key_of(job))
        elif attempt.number < ATTEMPTS:
            self._push(job, attempt.number + 1, known=True)
        else:
            self._num_done += 1
            self.failures.append(Failure(job.label, _describe(error, job.label), job.log_path))

    def _push(self, job: Job, number: int = 1, *, known: bool = False) -> None:
        cost = _TRACE_COST if isinstance(job, TraceJob) else self._seconds(job)
        self._num_known += not known
        heapq.heappush(self._queue, (-cost, next(self._order), _Attempt(job, number)))

    def _seconds(self, job: Job) -> float:
        """What a job may take; of a trace, with the unit that it finds."""
        estimates = self._plan.estimates
        if isinstance(job, CompileJob):
            return estimates.unit_seconds(job.label)
        is_step = job.entry.kind in ("prompt", "decode")
        return (TRACE_SECONDS if is_step else SMALL_TRACE_SECONDS) + estimates.unit_seconds(
            f"{'layer' if is_step else job.entry.kind} {job.entry}"
        )

    def _push_units(self, row: ProgramRow, trace: TraceJob) -> None:
        """Queues the units of a program that have no artifact; `trace` is what gives their texts again."""
        new = [key for key in row.units if key not in self._unit_keys]
        self._unit_keys.update(new)
        there = read_units(self._store, new)
        for key in (key for key in new if key not in there):
            self._origins[key] = trace
            self._push(self._compile_job(key, row.units[key]))

    def _trace_again(self, unit_key: str) -> None:
        """Forgets what is recorded of the program of a unit whose text is lost, and traces it anew, once."""
        trace = self._origins[unit_key]
        self._traced_again.add(unit_key)
        self._unit_keys.discard(unit_key)
        self._store.actions.discard(trace.key.hex)
        self._push(trace, known=True)

    def _compile_job(self, key: str, source: UnitSource) -> CompileJob:
        store, log_path = self._store, self._log_path(source.label, key)
        return CompileJob(
            key, source.text, source.label, self._plan.target, store.root, log_path, store.lower
        )

    def _trace_job(self, key: Any, entry: Any, spec: BuildSpec) -> TraceJob:
        log_path = self._log_path(f"trace {entry}", key.hex)
        store, target = self._store, self._plan.target
        return TraceJob(key, entry, spec.model, spec.limits, target, store.root, log_path, store.lower)

    def _log_path(self, label: str, key: str) -> Path:
        slug = "".join(c if c.isalnum() else "-" for c in label).strip("-")
        return self._store.root / "logs" / f"{slug[:_LONGEST_SLUG]}-{key[:12]}.log"


def _is_fatal(error: Exception) -> TypeGuard[AotGaudiError]:
    """True for errors that no other job will escape: what the user wrote, a store that takes no more."""
    return isinstance(error, (SpecError, ManifestError, StoreError))


def _describe(error: Exception, label: str) -> str:
    text = str(error).removeprefix(f"{label}: ").strip().splitlines()
    return text[0] if text else type(error).__name__
