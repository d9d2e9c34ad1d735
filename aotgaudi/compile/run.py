"""Runs a plan: traces untraced programs, compiles units without artifacts, and records each result at once.

First it compares the graphs with the model, if nobody has. Programs are traced meanwhile, but no unit is compiled before.

Each worker gets one job at a time, so a stop only waits for the running jobs: a build stops at a unit boundary, and the next
run continues there. A worker that dies or hangs is replaced and its job tried again. A job that fails twice is reported with
its log, and the others continue. A failure is never recorded as a result.

Many builders may work on one store. A job that another builder is working on is set aside and checked again from time to
time. If a result appears, it is taken. If that builder stops without a result, the job is queued again. In the same way, the
units that a trace finds are set aside while a remote is asked for them.

An error that affects every job (a model that cannot be built, a store that cannot be written, no card) ends the build. No
more jobs start, the running ones finish and are recorded, and then the error itself is raised, once.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeGuard

from aotgaudi.backends.base import require_installed
from aotgaudi.compile.jobs import (
    BuildJob,
    Built,
    Busy,
    CompileJob,
    LostTextError,
    ModelCheckJob,
    TraceJob,
    find_row,
    is_busy,
    key_of,
)
from aotgaudi.compile.keys import (
    BuiltRow,
    ModelCheckRow,
    ProgramRow,
    ProofRow,
    UnitRow,
    UnitSource,
    read_rows,
    record,
)
from aotgaudi.compile.plan import MODEL_CHECK_SECONDS, Plan, ProgramState, TimeLeft, Work
from aotgaudi.compile.workers import Done, Pool, WorkerDiedError
from aotgaudi.digest import Key
from aotgaudi.errors import (
    AotGaudiError,
    CardError,
    CompileError,
    ManifestError,
    ModelDiffersError,
    SpecError,
    StoreError,
    counted,
    store_errors,
)
from aotgaudi.graphs.dialect import dialect_of
from aotgaudi.manifest.memory import sized
from aotgaudi.share.remote_cache import RemoteCache, Traffic
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.store.store import Store

_LOG = logging.getLogger(__name__)

ATTEMPTS = 2

JobKind = Literal["check", "trace", "compile"]

_JOB_BYTES = 1 << 20
"""A traced program or compiled unit with its records takes a third of this, and a worker's files as much again."""
_TOOLCHAIN_BYTES = 270 << 20
"""The precompiled headers of one toolchain (measured with g++ 12, torch 2.13)."""
_POLL_SECONDS = 0.2
_TRACE_COST = 1e9
"""Traces come first, because they find the units, and with them the total and a usable estimate."""

_FIRST_UNIT_COST = 2e9
"""The first unit of a run precedes other traces, because it fills the toolchain's cache. Otherwise workers that have nothing
left to trace would wait for that."""

_CHECK_COST = 3e9
"""The comparison with the model comes before everything: where it fails, nothing else is worth doing."""

_LONGEST_SLUG = 160
"""The most characters of a label in a file name, which itself may have 255."""


@dataclass(frozen=True)
class Progress:
    """A build's progress: jobs done and known so far, estimated seconds left, and the running jobs."""

    num_done: int
    num_total: int
    eta_seconds: float
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Failure:
    """A job that failed and will not be tried again."""

    label: str
    message: str
    log_path: Path


@dataclass(frozen=True)
class BuildOutcome:
    """The result of a run. `interrupted`: it was asked to stop, and stopped at a unit boundary.

    `seconds` is the run's wall-clock time. `worker_seconds` is the time of all `num_workers` workers by kind of job,
    including failed jobs. `model_check` is the comparison with the model, if this run made it. `proof` is the proof, for
    backends that need one. `remote` is what a remote gave and got.
    """

    num_traced: int = 0
    compiled: tuple[UnitRow, ...] = ()
    failures: tuple[Failure, ...] = ()
    seconds: float = 0.0
    interrupted: bool = False
    num_workers: int = 0
    worker_seconds: Mapping[JobKind, float] = field(default_factory=dict)
    model_check: ModelCheckRow | None = None
    proof: ProofRow | None = None
    remote: Traffic | None = None


class Watch:
    """Observes a run and may stop it. A context manager that is entered only while jobs run."""

    def __init__(
        self,
        on_progress: Callable[[Progress], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._on_progress, self._should_stop = on_progress, should_stop

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...

    def show(self, progress: Progress) -> None:
        """Called several times a second."""
        self._on_progress(progress)

    def warn(self, text: str) -> None:
        """Called with what has gone wrong without harm, from any thread."""
        _LOG.warning("%s", text)

    def should_stop(self) -> bool:
        """Whether to start no more jobs. Called several times a second; what it raises ends the running ones at once."""
        return self._should_stop()


def run_plan(
    plan: Plan,
    spec: BuildSpec,
    store: Store,
    pool: Pool[BuildJob],
    watch: Watch,
    remote: RemoteCache | None = None,
) -> BuildOutcome:
    """Runs to the end, or to the next unit boundary after `watch` says to stop. Enters `pool` if there is work for it.

    Units that a trace finds are looked up at `remote` before they are compiled, and results are uploaded if it takes them.

    Raises SpecError for a model that cannot be built, StoreError if the store cannot be written, CompileError if no worker
    can be started, MissingPackageError if torch or transformers is not installed. Earlier results stay in the store.
    """
    run = _Run(store, plan, spec, remote)
    started, num_workers = time.monotonic(), 0
    if run.num_queued or run.is_waiting:
        require_installed("build", "torch", "transformers", "safetensors")
        _require_space(store, plan.target.backend, run.num_known)
        with watch:
            if not watch.should_stop():
                with pool:
                    _work_off(pool, run, watch)
                    num_workers = pool.num_workers
                    watch.show(run.progress(num_workers))
    if run.fatal:
        raise run.fatal
    return BuildOutcome(
        num_traced=run.num_traced,
        compiled=tuple(run.compiled),
        failures=tuple(run.failures),
        seconds=time.monotonic() - started,
        interrupted=bool(run.num_queued or run.is_waiting),
        num_workers=num_workers,
        worker_seconds=run.worker_seconds,
        model_check=run.model_check,
    )


def _require_space(store: Store, backend: str, num_jobs: int) -> None:
    """Raises StoreError if a build of `num_jobs` programs and units, or more, would fill the store's file system."""
    needed = num_jobs * _JOB_BYTES
    if backend == "cpu" and not any(store.root.glob("toolcache/*/*")):
        needed += _TOOLCHAIN_BYTES
    with store_errors("look at", store.root):
        free = shutil.disk_usage(store.root).free
    if free < needed:
        raise StoreError(
            f"store at {store.root}: {sized(free)} are free on its file system, and building {counted(num_jobs, 'program')}"
            f" takes about {sized(needed)} (free space there, or use another place: --store DIR)"
        )


def _work_off(pool: Pool[BuildJob], run: _Run, watch: Watch) -> None:
    """Runs jobs until no work is left or, after a stop, until no job runs."""
    is_ending = False
    while True:
        is_ending = watch.should_stop() or is_ending or run.fatal is not None
        if run.is_waiting and not is_ending:
            run.look_at_others()
        while run.num_queued and not is_ending and run.num_running < pool.num_workers:
            run.start_next(pool)
        if is_ending:
            run.put_back(pool.withdraw())
        if not run.num_running and (is_ending or not run.is_waiting):
            return
        watch.show(run.progress(pool.num_workers))
        for done in pool.wait(_POLL_SECONDS):
            run.settle(done, is_stopping=watch.should_stop())


@dataclass(frozen=True)
class _Attempt:
    job: BuildJob
    number: int
    work: Work
    started: float = field(default_factory=time.monotonic)


class _Run:
    """The state of a run: a queue by cost, running jobs, jobs of other builders, and results.

    `fatal` is the error that ends the run.
    """

    def __init__(self, store: Store, plan: Plan, spec: BuildSpec, remote: RemoteCache | None) -> None:
        self.compiled: list[UnitRow] = []
        self.failures: list[Failure] = []
        self.fatal: AotGaudiError | None = None
        self.model_check: ModelCheckRow | None = None
        self.num_traced = 0
        self.worker_seconds: dict[JobKind, float] = {"trace": 0.0, "compile": 0.0}
        self._queue: list[tuple[float, int, _Attempt]] = []
        self._running: dict[int, _Attempt] = {}
        self._parked: list[_Attempt] = []
        self._asked: list[tuple[Future[bool], _Attempt]] = []
        self._num_done = self._num_known = 0
        self._order, self._tickets = itertools.count(), itertools.count()
        self._store, self._plan, self._remote = store, plan, remote
        self._time_left = TimeLeft()
        self._is_tracing = self._has_units = False
        self._unit_keys: set[str] = set(plan.units)
        self._origins: dict[str, TraceJob] = {}
        self._traced_again: set[str] = set()
        self._held: list[tuple[ProgramRow, TraceJob]] | None = None
        check = plan.model_check
        if check is not None and check.row is None:
            self._held = []
            self._push(self._check_job(check.key, spec))
        for state in plan.programs:
            trace = self._trace_job(state, spec)
            if state.row is None:
                self._push(trace)
            else:
                self._push_units(state.row, trace)

    @property
    def num_queued(self) -> int:
        """How many jobs could start now."""
        return len(self._queue)

    @property
    def num_known(self) -> int:
        """How many jobs are known so far."""
        return self._num_known

    @property
    def num_running(self) -> int:
        """How many jobs run in our pool."""
        return len(self._running)

    @property
    def is_waiting(self) -> bool:
        """Whether other builders are working on some of our jobs, or a remote is asked for their results."""
        return bool(self._parked or self._asked)

    def start_next(self, pool: Pool[BuildJob]) -> None:
        """Hands the costliest job to `pool`."""
        *_, attempt = heapq.heappop(self._queue)
        ticket = next(self._tickets)
        self._running[ticket] = replace(attempt, started=time.monotonic())
        try:
            pool.submit(ticket, attempt.job)
        except BaseException:
            del self._running[ticket]
            raise

    def put_back(self, tickets: Iterable[int]) -> None:
        """Queues jobs again that did not begin."""
        for attempt in map(self._running.pop, tickets):
            self._push(attempt.job, attempt.number, known=True)

    def settle(self, done: Done, *, is_stopping: bool) -> None:
        """Counts the result of a job, queues its second attempt, or reports its failure."""
        attempt = self._running.pop(done.ticket)
        seconds = time.monotonic() - attempt.started
        kind = _kind_of(attempt.job)
        self.worker_seconds[kind] = self.worker_seconds.get(kind, 0.0) + seconds
        if done.error is not None:
            self._failed(attempt, done.error, is_stopping)
        elif isinstance(done.result, Busy):
            self._parked.append(attempt)
        else:
            assert isinstance(done.result, Built)
            if done.result.is_new:
                self._time_left.learn(attempt.work, seconds)
            self._count(attempt.job, done.result.row, is_new=done.result.is_new)

    def look_at_others(self) -> None:
        """Takes the results of other builders and of the remote, and queues the jobs that they left without a result."""
        asked, self._asked = self._asked, []
        for answer, attempt in asked:
            if answer.done():
                self._parked.append(attempt)  # What came is in the store now.
                self._raise_later(answer.exception())
            else:
                self._asked.append((answer, attempt))
        parked, self._parked = self._parked, []
        for attempt in parked:
            row = find_row(self._store, attempt.job)
            if row is not None:
                self._count(attempt.job, row, is_new=False)
            elif is_busy(self._store, attempt.job):
                self._parked.append(attempt)
            else:
                self._push(attempt.job, attempt.number, known=True)

    def _raise_later(self, error: BaseException | None) -> None:
        if isinstance(error, AotGaudiError):
            self.fatal = self.fatal or error
        elif error is not None:
            raise error

    def progress(self, num_workers: int) -> Progress:
        """Returns the run's progress."""
        now = time.monotonic()
        begun = (*self._running.values(), *self._parked, *(attempt for _, attempt in self._asked))
        eta_seconds = self._time_left.seconds(
            waiting=[attempt.work for *_, attempt in self._queue],
            running=[(attempt.work, now - attempt.started) for attempt in begun],
            num_workers=num_workers,
        )
        labels = tuple(attempt.job.label for attempt in begun)
        return Progress(self._num_done, self._num_known, eta_seconds, labels)

    def _count(self, job: BuildJob, row: BuiltRow, *, is_new: bool) -> None:
        self._num_done += 1
        self._upload(key_of(job), row)
        if isinstance(row, ModelCheckRow):
            self.model_check = row if is_new else None
            self._release_units()
        elif isinstance(job, TraceJob) and isinstance(row, ProgramRow):
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
            self._push(job, attempt.number, known=True)  # It also got the signal that stops us.
        elif isinstance(error, LostTextError) and key_of(job) in self._origins.keys() - self._traced_again:
            self._trace_again(key_of(job))
        elif attempt.number < ATTEMPTS:
            self._push(job, attempt.number + 1, known=True)
        elif isinstance(job, ModelCheckJob):  # Without it no unit is compiled.
            what = _describe(error, job.label)
            self.fatal = self.fatal or CompileError(f"{job.label}: {what} (log: {job.log_path})")
        else:
            self._num_done += 1
            self.failures.append(Failure(job.label, _describe(error, job.label), job.log_path))

    def _push(self, job: BuildJob, number: int = 1, *, known: bool = False) -> None:
        attempt = self._attempt(job, number)
        if isinstance(job, ModelCheckJob):
            cost = _CHECK_COST
        elif isinstance(job, TraceJob):
            cost = _TRACE_COST
            self._is_tracing = True
        else:
            is_first = self._is_tracing and not self._has_units
            cost = _FIRST_UNIT_COST if is_first else attempt.work.seconds
            self._has_units = True
        self._num_known += not known
        heapq.heappush(self._queue, (-cost, next(self._order), attempt))

    def _attempt(self, job: BuildJob, number: int = 1) -> _Attempt:
        estimates = self._plan.estimates
        if isinstance(job, ModelCheckJob):
            work = Work(MODEL_CHECK_SECONDS)
        elif isinstance(job, TraceJob):
            work = estimates.of_entry(job.entry)
        else:
            work = Work(estimates.unit_seconds(job.label))
        return _Attempt(job, number, work)

    def _release_units(self) -> None:
        """Queues the units that waited for the comparison with the model."""
        held, self._held = self._held or [], None
        for row, trace in held:
            self._push_units(row, trace)

    def _push_units(self, row: ProgramRow, trace: TraceJob) -> None:
        """Queues the units of a program that have no artifact. `trace` can make their texts again."""
        if self._held is not None:
            self._held.append((row, trace))
            return
        new = [key for key in row.units if key not in self._unit_keys]
        self._unit_keys.update(new)
        there = read_rows(UnitRow, self._store, new)
        for key, unit in there.items():
            self._upload(key, unit)
        for key in (key for key in new if key not in there):
            self._origins[key] = trace
            job = self._compile_job(key, row.units[key])
            answer = self._ask(key)
            if answer is None:
                self._push(job)
            else:
                self._asked.append((answer, self._attempt(job)))
                self._num_known += 1

    def _upload(self, key: str, row: BuiltRow) -> None:
        if self._remote is not None:
            self._remote.upload(key, row)

    def _ask(self, unit_key: str) -> Future[bool] | None:
        """Asks the remote for a unit. Returns its answer to come; None if it does not have the unit."""
        if self._remote is None:
            return None
        answer = self._remote.look_up(unit_key, UnitRow.model_validate, record)
        is_miss = answer.done() and answer.exception() is None and not answer.result()
        return None if is_miss else answer

    def _trace_again(self, unit_key: str) -> None:
        """Discards the record of a program whose unit has lost its text, and traces the program again, once."""
        trace = self._origins[unit_key]
        self._traced_again.add(unit_key)
        self._unit_keys.discard(unit_key)
        self._store.actions.discard(trace.key.hex)
        self._push(trace, known=True)

    def _compile_job(self, key: str, source: UnitSource) -> CompileJob:
        place = self._place(source.label, key)
        return CompileJob(key, source.text, source.label, self._plan.target, *place)

    def _check_job(self, key: Key, spec: BuildSpec) -> ModelCheckJob:
        place = self._place(f"compare {spec.model.model_type} with transformers", key.hex)
        return ModelCheckJob(key, spec.model, dialect_of(spec), *place)

    def _trace_job(self, state: ProgramState, spec: BuildSpec) -> TraceJob:
        entry = state.entries[0]
        place = self._place(f"trace {entry}", state.key.hex)
        return TraceJob(
            state.key,
            entry,
            spec.model,
            spec.limits,
            self._plan.target,
            *place,
            n_splits=state.n_splits,
            dialect=dialect_of(spec),
        )

    def _place(self, label: str, key: str) -> tuple[Path, Path, tuple[Path, ...]]:
        """Returns the store's root, the job's log, and the store's lower layers."""
        slug = "".join(c if c.isalnum() else "-" for c in label).strip("-")
        log_path = self._store.root / "logs" / f"{slug[:_LONGEST_SLUG]}-{key[:12]}.log"
        return self._store.root, log_path, self._store.lower


def _kind_of(job: BuildJob) -> JobKind:
    if isinstance(job, ModelCheckJob):
        return "check"
    return "trace" if isinstance(job, TraceJob) else "compile"


def _is_fatal(error: Exception) -> TypeGuard[AotGaudiError]:
    """Whether an error affects every job: a user's mistake, a wrong model, a store that accepts no more data, or no card."""
    return isinstance(error, (SpecError, ModelDiffersError, ManifestError, StoreError, CardError))


def _describe(error: Exception, label: str) -> str:
    """Returns the first line of an error and, if a compiler's output follows, the last line of that which names an error."""
    lines = str(error).removeprefix(f"{label}: ").strip().splitlines() or [type(error).__name__]
    said = [line.strip() for line in lines[1:] if line.strip()]
    last = next((line for line in reversed(said) if "error" in line.lower()), said[-1] if said else "")
    return f"{lines[0]}: {last}" if last else lines[0]
