"""Runs a plan: traces what is not traced, compiles what has no artifact, records each as it is done.

One job a worker is handed out at a time, so that a stop loses nothing but waits for the jobs under way: a build stops
at unit boundaries and the next run goes on from there. A worker that dies or hangs is replaced and its job
tried again; a job that fails twice is reported with its log, and the others go on. A failure is never recorded as a
result.

Many builders may work on one store. What another one is at goes aside, and is looked at again while there is other work,
or at the end: its result is taken as it appears, and a builder that leaves without one is succeeded.

What no job can mend (a model that cannot be built, a store that cannot be written) ends the build: no more
jobs are handed out, those under way are waited for and recorded, and then the error itself is raised, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from aotgaudi.build.keys import require_key_parts
from aotgaudi.build.once import Job, build_once
from aotgaudi.build.plan import Plan
from aotgaudi.build.pool import UNIT_TIMEOUT_SECONDS, LocalPool, Pool
from aotgaudi.build.records import UnitRow
from aotgaudi.build.run import Failure, Progress, Run
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.store.store import Store

__all__ = ["BuildOutcome", "Executor", "Failure", "Progress"]

_POLL_SECONDS = 0.2

MakePool = Callable[[], AbstractContextManager[Pool]]


@dataclass(frozen=True)
class BuildOutcome:
    """What a run did. `interrupted`: it was asked to stop and did, at a unit boundary."""

    num_traced: int
    compiled: tuple[UnitRow, ...]
    failures: tuple[Failure, ...]
    seconds: float
    interrupted: bool


class Executor:
    """Runs plans against one store with `num_workers` processes, or with the workers of what `make_pool` gives.

    `should_stop` is asked between jobs.
    """

    def __init__(
        self,
        store: Store,
        num_workers: int,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        on_progress: Callable[[Progress], None] = lambda _: None,
        timeout_seconds: float = UNIT_TIMEOUT_SECONDS,
        make_pool: MakePool | None = None,
    ) -> None:
        self._store = store
        self._should_stop = should_stop
        self._on_progress = on_progress
        self._make_pool = make_pool or (
            lambda: LocalPool(num_workers, store.root / "toolcache", timeout_seconds=timeout_seconds)
        )

    def run(self, plan: Plan, spec: BuildSpec) -> BuildOutcome:
        """Runs to the end, or to the next unit boundary after `should_stop` says so.

        Raises SpecError for a model that cannot be built, StoreError when the store cannot be written,
        CompileError when no worker can be started, MissingPackageError where torch or transformers is not
        installed; what was done until then is in the store.
        """
        run = Run(self._store, plan, spec)
        started = time.monotonic()
        if run.num_queued and not self._should_stop():
            require_key_parts()
            with self._make_pool() as pool:
                self._work_off(pool, run)
                self._on_progress(run.progress(pool.num_workers))
        if run.fatal:
            raise run.fatal
        return BuildOutcome(
            num_traced=run.num_traced,
            compiled=tuple(run.compiled),
            failures=tuple(run.failures),
            seconds=time.monotonic() - started,
            interrupted=bool(run.num_queued or run.is_waiting),
        )

    def _work_off(self, pool: Pool, run: Run) -> None:
        """Returns when nothing is left, or, at a stop, when nothing runs."""
        is_ending = False
        while True:
            is_ending = is_ending or run.fatal is not None or self._should_stop()
            if run.is_waiting and not is_ending:
                run.look_at_others()
            while run.num_queued and not is_ending and run.num_running < pool.num_workers:
                run.start_next(lambda ticket, job: _submit(pool, ticket, job))
            if not run.num_running and (is_ending or not run.is_waiting):
                return
            self._on_progress(run.progress(pool.num_workers))
            for done in pool.wait(_POLL_SECONDS):
                run.settle(done, is_stopping=self._should_stop())


def _submit(pool: Pool, ticket: int, job: Job) -> None:
    pool.submit(ticket, build_once, job)
