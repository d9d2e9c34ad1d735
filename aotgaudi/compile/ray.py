"""Workers on a Ray cluster: one task is one job, with one CPU.

On a node, a job runs as on this machine: in a process that the task supervises (workers.py). Timeouts, signals, settings and
the death of a worker therefore mean the same everywhere. Ray chooses the node and notices lost machines. Ray does not retry:
the run decides on second attempts (run.py).

The cluster exists already, or a process in a separate session starts one on this machine (`main`). Signals to the
builder's process group then stop the builder at a unit boundary, and leave the daemons that run its units alone.

A node that does not share the builder's store exchanges data through the build's remote. The builder uploads a job's input
(the text of a unit) before the job starts, and the node uploads the results (objects, then the record) before it is done.
Neither trusts the other: each hashes objects on arrival and checks records. The node's store is scratch, kept as a cache.
"""

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
from aotgaudi.compile.jobs import ROWS, BuildJob, Built, Busy, CompileJob, build_once, find_row, key_of
from aotgaudi.compile.keys import BuiltRow, record
from aotgaudi.compile.workers import UNIT_TIMEOUT_SECONDS, Done, JobTimeoutError, LocalPool, WorkerDiedError
from aotgaudi.digest import Digest, sha256_bytes
from aotgaudi.errors import AotGaudiError, CompileError, SpecError, StoreError, first_line
from aotgaudi.files import own_directory
from aotgaudi.share.remote import Remote, is_read_only, without_password
from aotgaudi.share.remote_cache import RemoteCache
from aotgaudi.store.store import Store

_ANSWER_SECONDS = 10.0
_CLOSING_SECONDS = 15.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def connected(address: str, num_cpus: int | None = None) -> Iterator[Any]:
    """Yields the module `ray`, connected to the cluster at `address` while the context lasts.

    `address` is Ray's form, or ``local`` to start a cluster here with `num_cpus` CPUs (None: all of this machine's).

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
        import ray  # Ray reads the token when it is imported.

        with _kept_handlers(), _at_the_root():
            try:
                ray.init(address, log_to_driver=False, logging_level="error")
            except Exception as error:
                reason = first_line(error)
                raise CompileError(f"cannot use the Ray cluster at {address}: {reason}") from error
        ends.callback(ray.shutdown)
        yield ray


def main() -> None:
    """Starts a cluster here in a child process, writes its address to stdout, and ends it when stdin ends.

    ``argv[1]`` is the number of its CPUs, or ``null`` for all of this machine's.
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
    """Lets only this process and its children use the cluster that it starts, unless the environment has a token."""
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
    """Yields the address of a new cluster on this machine. The cluster ends with the context or with this process."""
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
    """Ends the cluster that we started, by closing its stdin or by force. Its children end with it."""
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
    """Raises CompileError if nothing listens at ``HOST:PORT``. Ray itself would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not (host and port.isdecimal()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise CompileError(f"cannot use the Ray cluster at {address}: {error}") from error


@contextlib.contextmanager
def _at_the_root() -> Iterator[None]:
    """Works in ``/`` during the context, because Ray puts its driver's working directory first on all workers' import paths.

    Only root can put a file into ``/``. Meanwhile relative paths of other threads are wrong.
    """
    before = os.getcwd()
    os.chdir("/")
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _kept_handlers() -> Iterator[None]:
    """Keeps our signal handlers, because Ray replaces the SIGTERM handler that stops a build at a unit boundary."""
    saved = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in saved.items():
            signal.signal(number, handler)


def offer(job: BuildJob, store: Store, remote: Remote) -> None:
    """Uploads the input of `job` from `store`. Raises RemoteError, StoreError."""
    if isinstance(job, CompileJob):
        digest = Digest.parse(job.text)
        if not remote.has(digest):
            store.objects.verify(digest)
            remote.put(digest, store.objects.path(digest))


def collect(job: BuildJob, store: Store, remote: Remote) -> BuiltRow:
    """Downloads the result of `job` on a node into `store`. Raises StoreError if it is missing."""
    with RemoteCache(remote, store) as cache:
        _look_up(job, cache)
    row = find_row(store, job)
    if row is None:
        raise StoreError(
            f"{remote.label} does not have what {job.label} gave (is it the same place for all nodes?)"
        )
    return row


def build_through(job: BuildJob, url: str) -> Built | Busy:
    """Runs `build_once` on a node, in the node's store. Texts and rows travel through the remote at `url`."""
    store = Store.open(_scratch_store(url))
    here = replace(job, store_root=store.root, log_path=store.root / "logs" / job.log_path.name, lower=())
    with store.in_use(), RemoteCache(Remote(url), store, push=True) as remote:
        if _look_up(job, remote):
            row = find_row(store, job)
            if row is not None:
                return Built(row, is_new=False)
        if isinstance(job, CompileJob):
            remote.fetch(Digest.parse(job.text))
        built = build_once(here)
        if isinstance(built, Built):
            remote.upload(key_of(job), built.row).result()
        return built


def _look_up(job: BuildJob, remote: RemoteCache) -> bool:
    kind: type[Any] = ROWS[type(job)]
    return remote.look_up(key_of(job), kind.model_validate, record).result()


def _scratch_store(url: str) -> Path:
    """Returns this user's scratch store on this machine for data exchanged at `url`."""
    root = Path(tempfile.gettempdir()) / f"aotgaudi-{os.geteuid()}"
    if not own_directory(root):
        raise StoreError(f"{root} is not a directory of ours (remove it, or set TMPDIR)")
    return root / f"node-{sha256_bytes(url.encode())[:16]}"


_LOOK_SECONDS = 2.0
"""How long we rely on the known size of the cluster, which changes during a build."""

_GRACE_SECONDS = 60.0


class WorkerLostError(WorkerDiedError):
    """The process or machine that ran a job is gone. `reason` is the cluster's message."""

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason
        self.args = (reason,)

    def __reduce__(self) -> tuple[type[WorkerDiedError], tuple[Any]]:
        """Pickles by its part."""
        return type(self), (self.reason,)


@dataclass(frozen=True)
class NodeJob:
    """A job for a worker on a node: `job`, in the builder's store, or through a remote at the URL `exchange`."""

    job: BuildJob
    exchange: str | None

    def run(self) -> Built | Busy:
        """Does `job` once. Raises StoreError if this node does not see the builder's store."""
        if self.exchange is not None:
            return build_through(self.job, self.exchange)
        if not (self.job.store_root / "format").is_file():
            raise StoreError(
                f"{self.job.store_root} is no store on the node {os.uname().nodename}"
                " (let all nodes share that directory, or give --remote URL)"
            )
        return build_once(self.job)


@dataclass(frozen=True)
class RayPlace:
    """A cluster: `address` in Ray's form, or ``local`` for one on this machine. `exchange` None: nodes share the store."""

    address: str
    exchange: str | None = None

    def __post_init__(self) -> None:
        """Checks that the remote means the same on every node, and that nodes can write to it."""
        if self.exchange is not None and is_read_only(self.exchange):
            raise SpecError(
                "--remote",
                f"{without_password(self.exchange)!r:.200} can only be read, and nodes exchange results through it",
                "s3://, gs:// or a directory",
            )
        if self.exchange is not None and self.exchange.startswith((".", "~")):
            raise SpecError(
                "--remote",
                f"{self.exchange!r:.100} is another directory on every node",
                "/DIR, or a URL such as s3://BUCKET/PREFIX",
            )


class RayPool:
    """A `Pool` on the cluster at `place`, for jobs of `store`. `num_workers` limits how many run at once; None: no limit."""

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
        url = place.exchange
        self._exchange = None if url is None else Remote(url)
        self._tasks: dict[Any, tuple[int, BuildJob]] = {}
        self._known = (0, -_LOOK_SECONDS)

    def __enter__(self) -> RayPool:
        with contextlib.ExitStack() as started:
            self._ray = started.enter_context(connected(self._place.address, self._most))
            self._task = self._ray.remote(max_retries=0, num_cpus=1)(run_on_node)
            self._cluster = started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for task in self._tasks:
            with contextlib.suppress(Exception):  # The task may be done, or its node lost.
                self._ray.cancel(task, force=True)
        self._cluster.close()

    @property
    def num_workers(self) -> int:
        """See `Pool.num_workers`. The cluster's current capacity, but at least 1: that job may wait for a node."""
        known, when = self._known
        if time.monotonic() - when > _LOOK_SECONDS:
            known = int(self._ray.cluster_resources().get("CPU", 0))
            self._known = (known, time.monotonic())
        return max(1, min(known, self._most or known))

    def submit(self, ticket: int, job: BuildJob) -> None:
        """See `Pool.submit`. Raises RemoteError, StoreError."""
        if self._exchange is not None:
            offer(job, self._store, self._exchange)
        cache_dir = None if self._exchange is not None else self._store.root / "toolcache"
        task = self._task.remote(NodeJob(job, self._place.exchange), cache_dir, self._timeout_seconds)
        self._tasks[task] = (ticket, job)

    def withdraw(self) -> list[int]:
        """See `Pool.withdraw`. None: the cluster does not say which tasks wait for a node."""
        return []

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


def run_on_node(job: NodeJob, cache_dir: Path | None, timeout_seconds: float) -> tuple[Any, Exception | None]:
    """Runs in a task: does `job` in a child process, and returns its result or its error."""
    here = str(cache_dir or Path(tempfile.gettempdir()) / f"aotgaudi-{os.geteuid()}" / "toolcache")
    pool = _kept_pool(here, timeout_seconds)
    pool.submit(0, job)
    deadline = time.monotonic() + timeout_seconds + _GRACE_SECONDS
    while time.monotonic() < deadline:
        for done in pool.wait(1.0):
            return done.result, done.error
    return None, JobTimeoutError("timed out")


@functools.cache
def _kept_pool(cache_dir: str, timeout_seconds: float) -> LocalPool:
    """Returns this Ray worker's child process. It is kept because it has imported torch."""
    return LocalPool(1, Path(cache_dir), timeout_seconds=timeout_seconds)
