"""Runs a plan: traces what is not traced, compiles what has no artifact, records each as it is done.

The parent hands out one job a worker at a time, so that a stop loses nothing but waits for the jobs under
way: a build stops at unit boundaries and the next run goes on from there. A worker that dies or hangs is
replaced and its job tried again; a job that fails twice is reported with its log, and the others go on. A
failure is never recorded as a result.

What no job can mend (a model that cannot be built, a store that cannot be written) ends the build: no more
jobs are handed out, those under way are waited for and recorded, and then the error itself is raised, once.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TypeGuard, Union

from pebble import ProcessExpired, ProcessPool

from aotgaudi.build.plan import Plan, estimate_unit_seconds
from aotgaudi.build.records import ProgramRow, UnitRow, parse_unit_row
from aotgaudi.build.worker import CompileJob, TraceJob, run_compile, run_trace, start_worker
from aotgaudi.errors import AotGaudiError, CompileError, ManifestError, SpecError, StoreError
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.store.store import Store

Job = Union[TraceJob, CompileJob]

ATTEMPTS = 2
UNIT_TIMEOUT_SECONDS = 900.0
_POLL_SECONDS = 0.2


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
class BuildOutcome:
    """What a run did. `interrupted`: it was asked to stop and did, at a unit boundary."""

    num_traced: int
    compiled: tuple[UnitRow, ...]
    failures: tuple[Failure, ...]
    seconds: float
    interrupted: bool


@dataclass
class _Running:
    job: Job
    attempt: int
    started: float = field(default_factory=time.monotonic)


class Executor:
    """Runs plans against one store with `num_workers` processes. `should_stop` is asked between jobs."""

    def __init__(
        self,
        store: Store,
        num_workers: int,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        on_progress: Callable[[Progress], None] = lambda _: None,
        timeout_seconds: float = UNIT_TIMEOUT_SECONDS,
    ) -> None:
        self._store = store
        self._num_workers = num_workers
        self._should_stop = should_stop
        self._on_progress = on_progress
        self._timeout_seconds = timeout_seconds

    def run(self, plan: Plan, spec: BuildSpec) -> BuildOutcome:
        """Runs to the end, or to the next unit boundary after `should_stop` says so.

        Raises SpecError for a model that cannot be built, StoreError when the store cannot be written;
        what was done until then is in the store.
        """
        run = _Run(self._store, plan, spec)
        started = time.monotonic()
        workers = min(self._num_workers, len(run.queue) * 3)
        while run.queue and not self._is_ending(run):
            with _worker_pool(workers, self._store.root / "toolcache") as pool:
                self._drain(pool, run, workers)
        if workers:
            self._on_progress(run.progress(workers))
        if run.fatal:
            raise run.fatal
        return BuildOutcome(
            num_traced=run.num_traced,
            compiled=tuple(run.compiled),
            failures=tuple(run.failures),
            seconds=time.monotonic() - started,
            interrupted=bool(run.queue),
        )

    def _drain(self, pool: ProcessPool, run: _Run, workers: int) -> None:
        """Works the queue off; returns when it is empty, at a stop, or when the pool broke."""
        is_ending = False
        while True:
            is_ending = is_ending or self._is_ending(run)
            while run.queue and not is_ending and len(run.running) < workers:
                self._submit(pool, run, *run.take())
            if not run.running:
                return
            self._on_progress(run.progress(workers))
            done, _ = wait(run.running, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
            for future in done:
                run.settle(future, is_stopping=self._should_stop())
            if not pool.active:
                run.abandon()
                return

    def _is_ending(self, run: _Run) -> bool:
        return run.fatal is not None or self._should_stop()

    def _submit(self, pool: ProcessPool, run: _Run, job: Job, attempt: int) -> None:
        function: Callable[..., Any] = run_trace if isinstance(job, TraceJob) else run_compile
        try:
            future = pool.schedule(function, args=[job], timeout=self._timeout_seconds)
        except RuntimeError as error:  # The pool broke a moment ago.
            future = Future()
            future.set_exception(error)
        run.running[future] = _Running(job, attempt)


@contextlib.contextmanager
def _worker_pool(num_workers: int, cache_dir: Path) -> Iterator[ProcessPool]:
    """A pool of fresh processes. Left by an exception, it stops them at once."""
    pool = ProcessPool(
        max_workers=num_workers,
        initializer=start_worker,
        initargs=(str(cache_dir),),
        context=multiprocessing.get_context("spawn"),
    )
    try:
        _start(pool)
        yield pool
    except BaseException:
        pool.stop()
        raise
    else:
        pool.close()
    finally:
        pool.join()


def _start(pool: ProcessPool) -> None:
    """Starts the pool with Ctrl-C blocked, which its processes and threads inherit.

    A process that is still importing would else answer it with a traceback; see `start_worker` for later.
    """
    resource_tracker.ensure_running()  # It unblocks the signal when it starts.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        assert pool.active  # Asking starts it.
    except BrokenProcessPool as error:
        raise CompileError(f"cannot start worker processes: {error.__cause__} (use fewer: -j N)") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Run:
    """The state of one run: a queue by cost, what runs, and what came of it. `fatal`: what ends the run."""

    def __init__(self, store: Store, plan: Plan, spec: BuildSpec) -> None:
        self.queue: list[tuple[float, int, Job, int]] = []
        self.running: dict[Future[Any], _Running] = {}
        self.compiled: list[UnitRow] = []
        self.failures: list[Failure] = []
        self.fatal: AotGaudiError | None = None
        self.num_traced = 0
        self._num_done = self._num_known = 0
        self._order = itertools.count()
        self._store, self._plan = store, plan
        self._unit_keys: set[str] = set(plan.units)
        for state in plan.programs:
            if state.row is None:
                self._push(self._trace_job(state.key, state.entries[0], spec))
            else:
                self._push_units(state.row)

    def take(self) -> tuple[Job, int]:
        _, _, job, attempt = heapq.heappop(self.queue)
        return job, attempt

    def settle(self, future: Future[Any], *, is_stopping: bool) -> None:
        """Records the result of a finished job, or queues its second attempt, or reports it."""
        running = self.running.pop(future)
        try:
            self._record(running.job, future.result())
        except Exception as error:
            self._failed(running, error, is_stopping)

    def abandon(self) -> None:
        """Takes the jobs under way back from a pool that broke: an attempt of each is used up."""
        running, self.running = tuple(self.running.values()), {}
        for job in running:
            self._failed(job, BrokenProcessPool("the pool of worker processes broke"), is_stopping=False)

    def progress(self, workers: int) -> Progress:
        left = sum(-cost for cost, _, _, _ in self.queue if cost > -_TRACE_COST) + sum(
            estimate_unit_seconds(running.job.label) for running in self.running.values()
        )
        traces = sum(1 for cost, _, _, _ in self.queue if cost <= -_TRACE_COST)
        eta = (left + traces * _TRACED_SECONDS) / workers
        labels = tuple(running.job.label for running in self.running.values())
        return Progress(self._num_done, self._num_known, eta, labels)

    def _record(self, job: Job, result: ProgramRow | UnitRow) -> None:
        self._store.actions.put(
            job.key.hex if isinstance(job, TraceJob) else job.key, result.model_dump(mode="json")
        )
        self._num_done += 1
        if isinstance(result, ProgramRow):
            self.num_traced += 1
            self._push_units(result)
        else:
            self.compiled.append(result)

    def _failed(self, running: _Running, error: Exception, is_stopping: bool) -> None:
        job = running.job
        if _is_fatal(error):
            self.fatal = self.fatal or error
            self._push(job, running.attempt, known=True)
        elif is_stopping and isinstance(error, ProcessExpired):
            self._push(job, running.attempt, known=True)  # The signal that stops us has reached it, too.
        elif running.attempt < ATTEMPTS:
            self._push(job, running.attempt + 1, known=True)
        else:
            self._num_done += 1
            self.failures.append(Failure(job.label, _describe(error, job.label), job.log_path))

    def _push(self, job: Job, attempt: int = 1, *, known: bool = False) -> None:
        cost = _TRACE_COST if isinstance(job, TraceJob) else estimate_unit_seconds(job.label)
        self._num_known += not known
        heapq.heappush(self.queue, (-cost, next(self._order), job, attempt))

    def _push_units(self, row: ProgramRow) -> None:
        for key, source in row.units.items():
            if key in self._unit_keys:
                continue
            self._unit_keys.add(key)
            if parse_unit_row(self._store.actions.get(key), self._store.objects):
                continue
            log_path = self._log_path(source.label, key)
            self._push(
                CompileJob(key, source.text, source.label, self._plan.target, self._store.root, log_path)
            )

    def _trace_job(self, key: Any, entry: Any, spec: BuildSpec) -> TraceJob:
        log_path = self._log_path(f"trace {entry}", key.hex)
        return TraceJob(key, entry, spec.model, spec.limits, self._plan.target, self._store.root, log_path)

    def _log_path(self, label: str, key: str) -> Path:
        slug = "".join(c if c.isalnum() else "-" for c in label).strip("-")
        return self._store.root / "logs" / f"{slug[:_LONGEST_SLUG]}-{key[:12]}.log"


_TRACE_COST = 1000.0
"""Traces come first: only they tell which units there are, hence the total and a usable estimate."""

_TRACED_SECONDS = 12.0
"""What a step not yet traced may cost in all: the trace and a layer unit."""


_LONGEST_SLUG = 160
"""Characters of a label in a file name, which may have 255."""


def _is_fatal(error: Exception) -> TypeGuard[AotGaudiError]:
    """True for errors that no other job will escape: what the user wrote, a store that takes no more."""
    return isinstance(error, (SpecError, ManifestError, StoreError))


def _describe(error: Exception, label: str) -> str:
    if isinstance(error, ProcessExpired):
        code = error.exitcode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"died (exit code {code})"
        return f"the worker process {how}"
    if isinstance(error, TimeoutError):
        return "timed out"
    text = str(error).removeprefix(f"{label}: ").strip().splitlines()
    return text[0] if text else type(error).__name__
