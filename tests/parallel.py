"""What the processes of one test run share: whose turn it is, and what is made once for all of them.

``ci/test`` runs tests in several processes (pytest-xdist), each with folders of its own; a plain ``pytest`` in one, where
nothing here waits.
"""

from __future__ import annotations

import _posixsubprocess
import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"})


def nightly(*values: Any) -> list[Any]:
    """Returns parameters that repeat a test with other values, for ``ci/nightly``."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]


def is_parallel() -> bool:
    """Returns whether this process is one of several that share a run."""
    return "PYTEST_XDIST_WORKER" in os.environ


def run_folder(factory: pytest.TempPathFactory) -> Path:
    """Returns a folder that all processes of this run have, and no other run has."""
    own = factory.getbasetemp()
    folder = (own.parent if is_parallel() else own) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[], object]) -> None:
    """Has `make` called by one process of the run, the first that comes with this name; the others wait until it is done.

    Where it fails, it has failed for all of them.
    """
    done, failed = (run_folder(factory) / f"{name}.{end}" for end in ("done", "failed"))
    with _locked(done.with_suffix(".lock"), fcntl.LOCK_EX):
        assert not failed.exists(), f"{name} could not be made: {failed.read_text(encoding='utf-8')}"
        if done.exists():
            return
        try:
            make()
        except BaseException as error:
            failed.write_text(repr(error), encoding="utf-8")
            raise
        done.touch()


class ProcessWatch:
    """Notes the processes that this process starts, by whatever way. Its audit hook stays, as all do."""

    def __init__(self) -> None:
        self.started, self._pid, self._fork_exec = "", os.getpid(), _posixsubprocess.fork_exec
        sys.addaudithook(self._on_audit)
        # By which multiprocessing spawns, without an event.
        _posixsubprocess.fork_exec = self._noting_fork_exec

    def forget(self) -> None:
        """Forgets what was started."""
        self.started = ""

    def _on_audit(self, event: str, _: object) -> None:
        if event in _STARTS and os.getpid() == self._pid:
            self.started = event

    def _noting_fork_exec(self, *arguments: Any) -> Any:
        self.started = "multiprocessing"
        return self._fork_exec(*arguments)


def escaped(report: Any) -> Any:
    """Returns what a process tells of a test, as text that can be sent: a lone surrogate is written as its escape."""
    if isinstance(report, str):
        return report.encode("utf-8", "backslashreplace").decode()
    if isinstance(report, dict):
        return {escaped(key): escaped(value) for key, value in report.items()}
    return type(report)(map(escaped, report)) if isinstance(report, list | tuple) else report


@contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Waits for a turn to run: next to the tests of other processes, or `alone`.

    A waiting test holds the door, so no other test can overtake one that waits for the room to be empty.
    """
    kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    with _locked(folder / "door", fcntl.LOCK_EX) as door, _locked(folder / "room", kind):
        fcntl.flock(door, fcntl.LOCK_UN)
        yield


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, kind)
        yield descriptor
    finally:
        # Closing would not be enough: a process that a test forked may also have the descriptor.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
