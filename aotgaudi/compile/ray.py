"""Workers on a Ray cluster: one task is one job, with the resources that its target needs.

On a node, a job runs as it does here: in a process of its own that the task watches over (workers.py), so that
timeouts, signals, a worker's death and its settings mean the same on every machine. Ray says where, and notices machines
that are lost. It retries nothing: second attempts are the run's business (run.py).
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotgaudi.compile.cluster import connected, first_line
from aotgaudi.compile.exchange import build_through, collect, offer
from aotgaudi.compile.jobs import BuildJob, Built, Busy, build_once
from aotgaudi.compile.workers import UNIT_TIMEOUT_SECONDS, Done, JobTimeoutError, LocalPool, WorkerDiedError
from aotgaudi.errors import AotGaudiError, SpecError, StoreError
from aotgaudi.share.locations import open_remote
from aotgaudi.store.store import Store

_LOOK_SECONDS = 2.0
"""How old what we know of the cluster's size may be: it grows and shrinks while we build."""

_GRACE_SECONDS = 60.0
_DEVICES = frozenset({"hpu", "cuda"})


class WorkerLostError(WorkerDiedError):
    """The process, or the machine, that ran a job is gone; `reason` is what its cluster says of it."""

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason
        self.args = (reason,)

    def __reduce__(self) -> tuple[type[WorkerDiedError], tuple[Any]]:
        """Pickles by its part."""
        return type(self), (self.reason,)


@dataclass(frozen=True)
class NodeJob:
    """What a worker on a node runs: `job`, in the builder's store, or through a remote at the URL `exchange`."""

    job: BuildJob
    exchange: str | None

    def run(self) -> Built | Busy:
        """Does `job`, once. Raises StoreError where the builder's store is not to be seen from here."""
        if self.exchange is not None:
            return build_through(self.job, self.exchange)
        if not (self.job.store_root / "format").is_file():
            raise StoreError(
                f"{self.job.store_root} is no store on the node {os.uname().nodename}"
                " (let all nodes share that directory, or give --ray-store URL)"
            )
        return build_once(self.job)


@dataclass(frozen=True)
class RayPlace:
    """A cluster: `address` as Ray has it, or ``local`` for one on this machine. `exchange` None: the store is shared."""

    address: str
    backend: str
    exchange: str | None = None

    def __post_init__(self) -> None:
        """Checks that the place of exchange means the same on every node."""
        if self.exchange is not None and self.exchange.startswith((".", "~")):
            raise SpecError(
                "--ray-store",
                f"{self.exchange!r:.100} is another directory on every node",
                "/DIR, or a URL such as s3://BUCKET/PREFIX",
            )

    @property
    def resources(self) -> dict[str, Any]:
        """What one job takes, as options of a task."""
        if self.backend == "hpu":
            return {"num_cpus": 1, "resources": {"HPU": 1}}
        return {"num_cpus": 1, "num_gpus": 1} if self.backend == "cuda" else {"num_cpus": 1}

    @property
    def bound_by(self) -> str:
        """The resource that says how many jobs the cluster can run."""
        return {"hpu": "HPU", "cuda": "GPU"}.get(self.backend, "CPU")


class RayPool:
    """A `Pool` on the cluster at `place`, for jobs of `store`; at most `num_workers` at once where that is given."""

    def __init__(
        self,
        place: RayPlace,
        store: Store,
        *,
        num_workers: int | None = None,
        timeout_seconds: float = UNIT_TIMEOUT_SECONDS,
    ) -> None:
        self._place, self._store = place, store
        self._most = num_workers
        self._timeout_seconds = timeout_seconds
        self._exchange = None if place.exchange is None else open_remote(place.exchange).remote
        self._tasks: dict[Any, tuple[int, BuildJob]] = {}
        self._known = (0, -_LOOK_SECONDS)

    def __enter__(self) -> RayPool:
        with contextlib.ExitStack() as started:
            self._ray = started.enter_context(connected(self._place.address, self._most))
            self._task = self._ray.remote(max_retries=0, **self._place.resources)(run_on_node)
            self._cluster = started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for task in self._tasks:
            with contextlib.suppress(Exception):  # It may be done, or its node gone.
                self._ray.cancel(task, force=True)
        self._cluster.close()

    @property
    def num_workers(self) -> int:
        """See `Pool.num_workers`: what the cluster has now, and never less than 1, which then waits for a node."""
        known, when = self._known
        if time.monotonic() - when > _LOOK_SECONDS:
            known = int(self._ray.cluster_resources().get(self._place.bound_by, 0))
            self._known = (known, time.monotonic())
        return max(1, min(known, self._most or known))

    def submit(self, ticket: int, job: BuildJob) -> None:
        """See `Pool.submit`. Raises RemoteError, StoreError."""
        if self._exchange is not None:
            offer(job, self._store, self._exchange)
        cache_dir = None if self._exchange is not None else self._store.root / "toolcache"
        is_kept = self._place.backend not in _DEVICES
        task = self._task.remote(
            NodeJob(job, self._place.exchange), cache_dir, self._timeout_seconds, is_kept
        )
        self._tasks[task] = (ticket, job)

    def wait(self, timeout_seconds: float) -> list[Done]:
        """See `Pool.wait`."""
        if not self._tasks:
            time.sleep(timeout_seconds)
            return []
        ready, _ = self._ray.wait(list(self._tasks), num_returns=1, timeout=timeout_seconds)
        return [self._done(task) for task in ready]

    def _done(self, task: Any) -> Done:
        ticket, job = self._tasks.pop(task)
        try:
            result, error = self._ray.get(task)
            if self._exchange is not None and isinstance(result, Built):
                result = Built(collect(job, self._store, self._exchange), result.is_new)
        except AotGaudiError as refused:
            return Done(ticket, error=refused)
        except self._ray.exceptions.RayError as lost:
            reason = f"lost on the cluster: {type(lost).__name__}: {first_line(lost)}"
            return Done(ticket, error=WorkerLostError(reason))
        return Done(ticket, result, error)


def run_on_node(
    job: NodeJob, cache_dir: Path | None, timeout_seconds: float, is_kept: bool
) -> tuple[Any, Exception | None]:
    """The task: does `job` in a process of its own, and returns its result or its error."""
    here = str(cache_dir or Path(tempfile.gettempdir()) / f"aotgaudi-{os.geteuid()}" / "toolcache")
    if is_kept:
        return _run(_kept_pool(here, timeout_seconds), job, timeout_seconds)
    with LocalPool(1, Path(here), timeout_seconds=timeout_seconds) as pool:
        return _run(pool, job, timeout_seconds)  # A device is another task's when we are done.


@functools.cache
def _kept_pool(cache_dir: str, timeout_seconds: float) -> LocalPool:
    """The process of this Ray worker, for one job after the other: it has imported torch."""
    return LocalPool(1, Path(cache_dir), timeout_seconds=timeout_seconds)


def _run(pool: LocalPool, job: NodeJob, timeout_seconds: float) -> tuple[Any, Exception | None]:
    pool.submit(0, job)
    deadline = time.monotonic() + timeout_seconds + _GRACE_SECONDS
    while time.monotonic() < deadline:
        for done in pool.wait(1.0):
            return done.result, done.error
    return None, JobTimeoutError("timed out")
