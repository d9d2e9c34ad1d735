"""A Ray cluster to build on: one that there is, or one of our own on this machine.

One of our own belongs to a process in a session of its own (`main`): a signal to the builder's process group is the
builder's, which stops at a unit boundary, and not the end of the daemons that its units run under.

A job on a node that does not share the builder's store: what it needs and what it gives go through a remote.

What a job needs (the text of a unit) is put there before it starts, and what it gives (objects, then the record) before
it is done. Neither side believes the other: objects are hashed as they come, and records checked. A node's own store
is scratch, kept for what the node may be asked again.

Workers on a Ray cluster: one task is one job, with the resources that its target needs.

On a node, a job runs as it does here: in a process of its own that the task watches over (workers.py), so that
timeouts, signals, a worker's death and its settings mean the same on every machine. Ray says where, and notices machines
that are lost. It retries nothing: second attempts are the run's business (run.py)."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aotgaudi.child import python_command
from aotgaudi.compile.jobs import (
    BuildJob,
    Built,
    Busy,
    CompileJob,
    Row,
    TraceJob,
    build_once,
    find_row,
    key_of,
)
from aotgaudi.compile.keys import ProgramRow, UnitRow
from aotgaudi.compile.share import pull_row, push_rows, receive_object
from aotgaudi.compile.workers import UNIT_TIMEOUT_SECONDS, Done, JobTimeoutError, LocalPool, WorkerDiedError
from aotgaudi.digest import Digest, sha256_bytes
from aotgaudi.errors import AotGaudiError, CompileError, SpecError, StoreError
from aotgaudi.share.locations import open_remote
from aotgaudi.share.remote import Remote
from aotgaudi.share.transfer import Conduct, Sources, send
from aotgaudi.store.store import Store

_ANSWER_SECONDS = 10.0
_CLOSING_SECONDS = 15.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def connected(address: str, num_cpus: int | None = None) -> Iterator[Any]:
    """The module `ray`, connected to the cluster at `address` for as long as the context lasts.

    `address` is as Ray has it, or ``local`` for a cluster of our own with `num_cpus` CPUs (None: this machine's).

    Raises:
        SpecError: Ray is not installed.
        CompileError: the cluster cannot be started or reached.
    """
    if find_spec("ray") is None:
        raise SpecError("--ray", "Ray is not installed", "pip install 'aotgaudi[ray]'")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with contextlib.ExitStack() as ends:
        if address == "local":
            ends.enter_context(_our_token())
            address = ends.enter_context(_our_cluster(num_cpus))
        else:
            _require_answer(address)
        import ray  # It looks for a token once.

        with _kept_handlers():
            try:
                ray.init(address, log_to_driver=False, logging_level="error")
            except Exception as error:
                reason = first_line(error)
                raise CompileError(f"cannot use the Ray cluster at {address}: {reason}") from error
        ends.callback(ray.shutdown)
        yield ray


def first_line(error: Exception) -> str:
    """The first line of what `error` says, or its name; 300 characters at most."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def main() -> None:
    """A process that starts a cluster on this machine, tells its address on stdout, and ends it when stdin ends.

    ``argv[1]`` is how many CPUs it has, or ``null`` for all of them.
    """
    num_cpus = json.loads(sys.argv[1])
    try:
        import ray

        ray.init(
            "local",
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
        )
        said = {"address": ray.get_runtime_context().gcs_address}
    except Exception as error:
        said = {"error": first_line(error)}
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


@contextlib.contextmanager
def _our_token() -> Iterator[None]:
    """Only this process and its children may use what it starts here; unless the environment says who may."""
    ours = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    added = ours.keys() - os.environ.keys()
    os.environ.update({name: ours[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _our_cluster(num_cpus: int | None) -> Iterator[str]:
    """The address of a cluster on this machine, which ends with the context, or with this process however that ends."""
    process = subprocess.Popen(
        python_command("aotgaudi.compile.ray", json.dumps(num_cpus)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline() or '{"error": "its process ended"}')
        if "error" in said:
            raise CompileError(f"cannot start a Ray cluster on this machine: {said['error']}")
        yield said["address"]
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a cluster of our own: at the end of its stdin, or by force. What it started ends with it."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(_CLOSING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def _require_answer(address: str) -> None:
    """Raises CompileError where nothing listens at ``HOST:PORT``: Ray itself would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not (host and port.isdecimal()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise CompileError(f"cannot use the Ray cluster at {address}: {error}") from error


@contextlib.contextmanager
def _kept_handlers() -> Iterator[None]:
    """Ray takes SIGTERM over, which is ours: it stops the build at a unit boundary."""
    saved = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in saved.items():
            signal.signal(number, handler)


_CONDUCT = Conduct(num_threads=4)


def offer(job: BuildJob, store: Store, remote: Remote) -> None:
    """Puts what `job` needs from `store` into `remote`. Raises as `transfer.send` does."""
    if isinstance(job, CompileJob):
        digest = Digest.parse(job.text)
        send(remote, {digest: store.objects.path(digest)}, _CONDUCT)


def collect(job: BuildJob, store: Store, remote: Remote) -> Row:
    """Brings what `job` gave on a node from `remote` into `store`. Raises StoreError where it is not there."""
    _pull(job, store, Sources([remote], _CONDUCT))
    row = find_row(store, job)
    if row is None:
        raise StoreError(
            f"{remote.label} does not have what {job.label} gave (is it the same place for all nodes?)"
        )
    return row


def build_through(job: BuildJob, url: str) -> Built | Busy:
    """In a worker on a node: does `build_once` in this node's own store; texts come, and rows go, by way of `url`."""
    remote = open_remote(url).remote
    store = Store.open(_scratch_store(url))
    sources = Sources([remote], _CONDUCT)
    here = replace(job, store_root=store.root, log_path=store.root / "logs" / job.log_path.name, lower=())
    with store.in_use():
        if _pull(job, store, sources):
            row = find_row(store, job)
            if row is not None:
                return Built(row, is_new=False)
        if isinstance(job, CompileJob):
            receive_object(Digest.parse(job.text), store, sources)
        built = build_once(here)
        if isinstance(built, Built):
            push_rows({key_of(job): built.row}, store, remote, _CONDUCT)
        return built


def _pull(job: BuildJob, store: Store, sources: Sources) -> bool:
    if isinstance(job, TraceJob):
        return pull_row(key_of(job), ProgramRow.model_validate, store, sources)
    return pull_row(key_of(job), UnitRow.model_validate, store, sources)


def _scratch_store(url: str) -> Path:
    """This machine's own store for what is exchanged at `url`; of this user alone."""
    root = Path(tempfile.gettempdir()) / f"aotgaudi-{os.geteuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    return root / f"node-{sha256_bytes(url.encode())[:16]}"


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
