"""Worker processes on this machine: the builder's side (`LocalPool`) and the workers' (`main`).

Each worker has one socket and shares nothing with the others: no queue, no lock. A worker that is killed takes its job
with it and disturbs no other. The builder notices at once (the socket closes), and the next job starts a new worker.
There are no threads: everything happens in `LocalPool.wait`.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import Any, Protocol, TypeVar

from aotgaudi.child import die_with_parent, end, python_command, travels
from aotgaudi.errors import AotGaudiError, CardError, CompileError
from aotgaudi.store.scratch import plain_path

UNIT_TIMEOUT_SECONDS = 900.0
_GARBAGE_THRESHOLD = 70_000
"""A hundred times Python's default, with which garbage collection took a tenth of a worker's time and found little."""

_CLOSING_SECONDS = 30.0
"""Torch takes a second to end, and on a busy machine several. A worker that is killed meanwhile leaves its semaphores."""
_WAIT_SECONDS = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_TORCH_SETTINGS = ("TORCHINDUCTOR_", "AOT_INDUCTOR_", "AOTINDUCTOR_", "INDUCTOR_", "TORCHDYNAMO_")
"""Prefixes of variables that change what torch traces and generates. No key contains them."""


class WorkerDiedError(CompileError):
    """The process that ran a job ended before the job did. As in subprocess, a negative `exit_code` is a signal."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code
        how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"died (exit code {exit_code})"
        super().__init__(f"the worker process {how}")

    def __reduce__(self) -> tuple[type[WorkerDiedError], tuple[Any]]:
        """Pickles by its argument."""
        return type(self), (self.exit_code,)


class JobTimeoutError(CompileError):
    """A job exceeded its time limit; its process was killed."""


class Job(Protocol):
    """A value that travels to a worker (it can be pickled)."""

    def run(self) -> Any:
        """Does the job, in the worker. The result or error travels back."""
        ...


@dataclass(frozen=True)
class Done:
    """The result or the error of the job `ticket`."""

    ticket: int
    result: Any = None
    error: Exception | None = None


JobT_contra = TypeVar("JobT_contra", bound=Job, contravariant=True)


class Pool(Protocol[JobT_contra]):
    """Runs jobs, one per worker. A context manager: an exception that leaves it stops running jobs at once."""

    @property
    def num_workers(self) -> int:
        """How many jobs may run now."""
        ...

    def __enter__(self) -> Any: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...

    def submit(self, ticket: int, job: JobT_contra) -> None:
        """Starts `job`. At most `num_workers` may run."""
        ...

    def withdraw(self) -> list[int]:
        """Takes back the jobs that wait for a worker of their kind, and returns their tickets. A build that ends does it."""
        ...

    def wait(self, timeout_seconds: float) -> list[Done]:
        """Returns finished jobs as soon as there are any, or an empty list after `timeout_seconds`."""
        ...


def run_all(pool: Pool[Any], jobs: Sequence[Any]) -> list[Any]:
    """Enters `pool`, runs all `jobs` in it, and returns their results, in order. Raises the first error.

    A job whose worker dies or hangs is a CompileError with its `label`.
    """
    found: dict[int, Any] = {}
    num_started = 0
    with pool:
        while len(found) < len(jobs):
            while num_started < min(len(jobs), len(found) + pool.num_workers):
                pool.submit(num_started, jobs[num_started])
                num_started += 1
            for done in pool.wait(_WAIT_SECONDS):
                if isinstance(done.error, (WorkerDiedError, JobTimeoutError)):
                    raise CompileError(f"{jobs[done.ticket].label}: {done.error}") from done.error
                if done.error is not None:
                    raise done.error
                found[done.ticket] = done.result
    return [found[ticket] for ticket in range(len(jobs))]


class LocalPool:
    """Processes on this machine, started when there is a job for them."""

    def __init__(
        self,
        num_workers: int,
        cache_dir: Path,
        *,
        timeout_seconds: float = UNIT_TIMEOUT_SECONDS,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment` is that of the workers; None means this process's."""
        self._environment = environment
        self.num_workers = num_workers
        self._cache_dir = cache_dir
        self._timeout_seconds = timeout_seconds
        self._workers: list[_Worker] = []
        self._done: list[Done] = []

    def __enter__(self) -> LocalPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.stop()

    def submit(self, ticket: int, job: Job) -> None:
        """See `Pool.submit`. Raises CompileError if no process can be started."""
        for worker in [worker for worker in self._workers if worker.ticket is None]:
            if worker.take(ticket, self._timeout_seconds, job):
                return
            self._remove(worker)  # It died while idle.
        worker = _start(self._cache_dir, self._environment)
        self._workers.append(worker)
        if not worker.take(ticket, self._timeout_seconds, job):
            self._done.append(self._end_of(worker, ticket))

    def withdraw(self) -> list[int]:
        """See `Pool.withdraw`. None waits."""
        return []

    def wait(self, timeout_seconds: float) -> list[Done]:
        """See `Pool.wait`."""
        busy = [worker for worker in self._workers if worker.ticket is not None]
        if not self._done:
            _pause(busy, timeout_seconds)
        for worker in busy:
            done = self._look_at(worker)
            if done is not None:
                self._done.append(done)
        done_now, self._done = self._done, []
        return done_now

    def close(self) -> None:
        """Lets idle workers end, and kills the others."""
        idle = [worker for worker in self._workers if worker.ticket is None]
        for worker in idle:
            worker.connection.close()
        deadline = time.monotonic() + _CLOSING_SECONDS
        for worker in idle:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
        self.stop()

    def stop(self) -> None:
        """Kills the workers and their compilers."""
        for worker in tuple(self._workers):
            self._remove(worker)

    def _look_at(self, worker: _Worker) -> Done | None:
        ticket = worker.ticket
        assert ticket is not None
        try:
            if worker.connection.poll():
                result, error = worker.connection.recv()
                worker.ticket = None
                if isinstance(error, CardError):
                    self._remove(worker)  # A driver that does not answer this process may answer the next.
                return Done(ticket, result, error)
        except (EOFError, OSError):
            return self._end_of(worker, ticket)
        if worker.process.poll() is not None and not worker.connection.poll():
            return self._end_of(worker, ticket)
        if time.monotonic() > worker.deadline:
            self._remove(worker)
            return Done(ticket, error=JobTimeoutError("timed out"))
        return None

    def _end_of(self, worker: _Worker, ticket: int) -> Done:
        """Returns the result of a job whose worker closed its end of the socket: it is dead or dying."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(1.0)
        self._remove(worker)
        return Done(ticket, error=WorkerDiedError(worker.process.returncode))

    def _remove(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.connection.close()
        end(worker.process)  # A hanging compiler below it would run for ever.


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    ticket: int | None = None
    deadline: float = 0.0

    def take(self, ticket: int, timeout_seconds: float, job: Job) -> bool:
        """Sends a job to the process. Returns False if it is dead."""
        try:
            # An idle process sends nothing, except that it ends.
            if self.process.poll() is not None or self.connection.poll():
                return False
            self.connection.send(job)
        except OSError:
            return False
        self.ticket, self.deadline = ticket, time.monotonic() + timeout_seconds
        return True


def _pause(busy: list[_Worker], timeout_seconds: float) -> None:
    deadlines = [worker.deadline - time.monotonic() for worker in busy]
    seconds = max(0.0, min([timeout_seconds, *deadlines]))
    if busy:
        wait_for_any([worker.connection for worker in busy], seconds)
    else:
        time.sleep(seconds)


def _start(cache_dir: Path, environment: Mapping[str, str] | None) -> _Worker:
    try:
        ours, theirs = Pipe()
        with theirs:
            return _Worker(_launch(theirs.fileno(), cache_dir, environment), ours)
    except OSError as error:
        remedy = " (use fewer: -j N)" if error.errno in (errno.EAGAIN, errno.ENOMEM) else ""
        raise CompileError(f"cannot start worker processes: {error}{remedy}") from error


def _launch(
    descriptor: int, cache_dir: Path, environment: Mapping[str, str] | None
) -> subprocess.Popen[bytes]:
    command = python_command("aotgaudi.compile.workers", str(descriptor), str(cache_dir), str(os.getpid()))
    with _blocked_signals():
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(descriptor,), env=environment)


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """Blocks the signals that stop a build. New processes inherit this, since an early signal would cause a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def main() -> None:
    """Runs in a worker: does one job after another from the socket ``argv[1]``, until it is closed.

    ``argv[2]`` is the directory of the toolchain's cache, ``argv[3]`` the parent's process id.
    """
    descriptor, cache_dir, parent = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    os.set_inheritable(descriptor, False)  # Else a compiler would keep it open and hide our death.
    start_worker(cache_dir)
    die_with_parent(parent, signal.SIGKILL)  # A hanging job would hold its unit's lock for ever.
    with Connection(descriptor) as connection, contextlib.suppress(EOFError, ConnectionError):
        while True:
            connection.send(_outcome(connection.recv()))


def start_worker(cache_dir: str) -> None:
    """Prepares a new process before torch is imported: one thread, signals left to the parent, directories with plain paths.

    It removes the user's settings of torch, so that one key means one set of bytes in any environment. Ctrl-C or a
    supervisor's SIGTERM reaches the whole process group. Only the parent acts on it, so that the running unit is finished
    (its compiler inherits the ignored signals).
    """
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # The parent had blocked them.
    gc.set_threshold(_GARBAGE_THRESHOLD)
    for name in [name for name in os.environ if name.startswith(_TORCH_SETTINGS)]:
        del os.environ[name]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), "1")
    tempfile.tempdir = str(plain_path(Path(tempfile.gettempdir())))  # Inductor compiles a header there.
    os.environ.update(
        threads,
        TMPDIR=tempfile.tempdir,
        TORCHINDUCTOR_CACHE_DIR=str(plain_path(Path(cache_dir))),
        TOKENIZERS_PARALLELISM="false",
    )


def _outcome(job: Job) -> tuple[Any, Exception | None]:
    try:
        return job.run(), None
    except AotGaudiError as error:
        return None, error if travels(error) else CompileError(str(error))
    except Exception as error:
        return None, CompileError(f"{type(error).__name__}: {error}")
