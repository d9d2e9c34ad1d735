"""Worker processes on this machine, watched over by the one that needs them.

Each worker has a socket of its own and nothing in common with the others: no queue, no lock. One that is killed, at
whatever moment, takes its job with it and disturbs no other. Its end is seen at once (its socket closes), and
the next job starts a new one. There are no threads: `LocalPool.wait` is where everything happens.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import Any, Protocol

from aotgaudi.errors import CompileError

UNIT_TIMEOUT_SECONDS = 900.0

_PROGRAM = "import sys; sys.path[:] = {path!r}; from aotgaudi.build.process import main; main()"
_CLOSING_SECONDS = 5.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class WorkerDiedError(CompileError):
    """The process that ran a job ended before the job did. `exit_code` is negative for a signal, as in subprocess."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code
        how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"died (exit code {exit_code})"
        super().__init__(f"the worker process {how}")

    def __reduce__(self) -> tuple[type[WorkerDiedError], tuple[Any]]:
        """Pickles by its part."""
        return type(self), (self.exit_code,)


class WorkerLostError(WorkerDiedError):
    """The process, or the machine, that ran a job elsewhere is gone; `reason` is what its cluster says of it."""

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason
        self.args = (reason,)

    def __reduce__(self) -> tuple[type[WorkerDiedError], tuple[Any]]:
        """Pickles by its part."""
        return type(self), (self.reason,)


class JobTimeoutError(CompileError):
    """A job took longer than it may; its process was killed."""


@dataclass(frozen=True)
class Done:
    """What came of the job `ticket`: a result, or an error."""

    ticket: int
    result: Any = None
    error: Exception | None = None


class Pool(Protocol):
    """Where jobs run, one a worker. A context manager: left by an exception, it stops what runs at once."""

    @property
    def num_workers(self) -> int:
        """How many jobs may be under way now."""
        ...

    def submit(self, ticket: int, function: Callable[..., Any], *arguments: Any) -> None:
        """Starts ``function(*arguments)``, both of which travel; at most `num_workers` may be under way."""
        ...

    def wait(self, timeout_seconds: float) -> list[Done]:
        """Returns the jobs that ended, as soon as there are any, or none after `timeout_seconds`."""
        ...


class LocalPool:
    """Processes of this machine, started when there is a job for them."""

    def __init__(
        self, num_workers: int, cache_dir: Path, *, timeout_seconds: float = UNIT_TIMEOUT_SECONDS
    ) -> None:
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

    def submit(self, ticket: int, function: Callable[..., Any], *arguments: Any) -> None:
        """See `Pool.submit`. Raises CompileError when no process can be started."""
        for worker in [worker for worker in self._workers if worker.ticket is None]:
            if worker.take(ticket, self._timeout_seconds, function, arguments):
                return
            self._remove(worker)  # It died while it had nothing to do.
        worker = _start(self._cache_dir)
        self._workers.append(worker)
        if not worker.take(ticket, self._timeout_seconds, function, arguments):
            self._done.append(self._end_of(worker, ticket))

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
        """Lets the workers end by themselves, which they do when they have no job."""
        for worker in self._workers:
            worker.connection.close()
        deadline = time.monotonic() + _CLOSING_SECONDS
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
        self.stop()

    def stop(self) -> None:
        """Kills the workers, and the compilers that they run."""
        for worker in tuple(self._workers):
            self._remove(worker)

    def _look_at(self, worker: _Worker) -> Done | None:
        ticket = worker.ticket
        assert ticket is not None
        try:
            if worker.connection.poll():
                result, error = worker.connection.recv()
                worker.ticket = None
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
        """The worker has closed its end: it is dead, or dies now."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(1.0)
        self._remove(worker)
        return Done(ticket, error=WorkerDiedError(worker.process.returncode))

    def _remove(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.connection.close()
        if worker.process.poll() is None:
            _kill_with_children(worker.process.pid)
        worker.process.wait()


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    ticket: int | None = None
    deadline: float = 0.0

    def take(
        self, ticket: int, timeout_seconds: float, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> bool:
        """Hands a job over; False when the process is dead."""
        try:
            if (
                self.process.poll() is not None or self.connection.poll()
            ):  # What it could say now is that it ends.
                return False
            self.connection.send((function, arguments))
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


def _start(cache_dir: Path) -> _Worker:
    try:
        ours, theirs = Pipe()
        with theirs:
            return _Worker(_launch(theirs.fileno(), cache_dir), ours)
    except OSError as error:
        raise CompileError(f"cannot start worker processes: {error} (use fewer: -j N)") from error


def _launch(descriptor: int, cache_dir: Path) -> subprocess.Popen[bytes]:
    code = _PROGRAM.format(path=sys.path)
    command = [sys.executable, "-c", code, str(descriptor), str(cache_dir), str(os.getpid())]
    with _blocked_signals():
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(descriptor,))


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """Blocks what stops a build, which a new process inherits: it could not answer yet but with a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill_with_children(pid: int) -> None:
    """Kills a process and what it has started: a compiler that hangs would go on for ever."""
    children = _children(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for child in children:
        _kill_with_children(child)


def _children(pid: int) -> list[int]:
    """The children of a process; none where the kernel does not say (CONFIG_PROC_CHILDREN)."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text(encoding="ascii").split())
    return found
