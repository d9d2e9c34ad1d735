"""What several processes of a test run rely on: turns that exclude each other where they should, and things made once."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import psutil
import pytest

from tests.parallel import escaped, once, run_folder, turn

SECONDS = 30.0
TESTS = Path(__file__).parents[1]


class Factory(pytest.TempPathFactory):
    """That of a process whose folder is `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def getbasetemp(self) -> Path:
        self._folder.mkdir(exist_ok=True)
        return self._folder


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Factory:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    return Factory(tmp_path / "popen-gw0")


@pytest.fixture
def second(tmp_path: Path) -> Factory:
    return Factory(tmp_path / "popen-gw1")


def is_free(path: Path, kind: int) -> bool:
    with path.open("w") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_turns_are_had_beside_each_other(tmp_path: Path) -> None:
    with turn(tmp_path, alone=False), turn(tmp_path, alone=False):
        assert not is_free(tmp_path / "room", fcntl.LOCK_EX)


def test_who_is_alone_has_nobody_beside_it(tmp_path: Path) -> None:
    with turn(tmp_path, alone=True):
        assert not is_free(tmp_path / "room", fcntl.LOCK_SH)

    assert is_free(tmp_path / "room", fcntl.LOCK_EX)


@pytest.mark.process
def test_a_turn_ends_with_the_test_even_where_a_fork_of_it_lives_on(tmp_path: Path) -> None:
    """A fork has the open file, and with it the lock."""
    with turn(tmp_path, alone=True):
        fork = os.fork()
        if fork == 0:
            signal.pause()

    try:
        assert is_free(tmp_path / "room", fcntl.LOCK_EX)
        assert is_free(tmp_path / "door", fcntl.LOCK_EX)
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)


def test_who_waits_to_be_alone_is_not_passed(tmp_path: Path) -> None:
    was_alone = threading.Event()

    def be_alone() -> None:
        with turn(tmp_path, alone=True):
            was_alone.set()

    with turn(tmp_path, alone=False):
        waiting = threading.Thread(target=be_alone)
        waiting.start()
        wait_until(lambda: not is_free(tmp_path / "door", fcntl.LOCK_SH))
        assert not was_alone.is_set()
    waiting.join(SECONDS)

    assert was_alone.is_set()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_all_processes_need_is_made_by_the_first(first: Factory, second: Factory) -> None:
    made: list[Path] = []

    for factory in (first, second, first):
        once(factory, "bundle", lambda factory=factory: made.append(factory.getbasetemp()))

    assert made == [first.getbasetemp()]
    assert run_folder(first) == run_folder(second)


def test_what_cannot_be_made_is_not_tried_again(first: Factory, second: Factory) -> None:
    def fail() -> None:
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        once(first, "bundle", fail)
    with pytest.raises(AssertionError, match=r"bundle could not be made: ValueError\('no room'\)"):
        once(second, "bundle", lambda: None)


def test_one_process_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)

    assert run_folder(Factory(tmp_path / "alone")).parent == tmp_path / "alone"


def test_a_report_can_be_sent_whatever_a_test_has_said() -> None:
    """The worker of pytest-xdist ended where a test had logged half of a surrogate pair."""
    report = {
        "nodeid": "a",
        "sections": [("Captured log", "\ud800 \u20ac")],
        "duration": 0.5,
        "longrepr": None,
    }

    assert escaped(report) == {**report, "sections": [("Captured log", "\\ud800 \u20ac")]}


def test_no_file_of_tests_lies_where_pytest_does_not_look(pytestconfig: pytest.Config) -> None:
    """By its own default pytest enters no folder named ``build``: hundreds of tests once ran by hand only."""
    left_out = pytestconfig.getini("norecursedirs")
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}

    found = [
        folder for folder in folders for name in folder.parts if any(fnmatch(name, one) for one in left_out)
    ]

    assert found == []


STUBBORN = """
import subprocess, sys, time
deaf = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; print(flush=True); time.sleep(600)"
parent = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {deaf!r}]).pid, flush=True)"
orphaned = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, start_new_session=True)
try:
    print(int(orphaned.stdout.readline()), len(orphaned.stdout.readline()), flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
time.sleep(600)
"""


@pytest.mark.process
def test_no_process_of_tests_that_are_stopped_is_left(pytestconfig: pytest.Config) -> None:
    """As `ci/test` runs them: a compiler without its builder is in a session of its own and ignores both signals."""
    command = [sys.executable, str(pytestconfig.rootpath / "ci" / "reaped.py"), "-c", STUBBORN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        left = psutil.Process(int(running.stdout.readline().split()[0]))
        running.send_signal(signal.SIGINT)
        assert running.stdout.readline() == "interrupted\n"
        assert left.is_running()
        running.send_signal(signal.SIGTERM)

        assert running.wait(30) == 128 + signal.SIGTERM
        assert not left.is_running()


@pytest.mark.process
@pytest.mark.parametrize(("code", "ends"), [("raise SystemExit(5)", 5), ("import os; os.abort()", 134)])
def test_tests_that_end_by_themselves_have_their_exit_code(
    pytestconfig: pytest.Config, code: str, ends: int
) -> None:
    command = [sys.executable, str(pytestconfig.rootpath / "ci" / "reaped.py"), "-c", code]

    assert subprocess.run(command, check=False).returncode == ends
