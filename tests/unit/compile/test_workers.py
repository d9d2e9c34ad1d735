"""Worker processes: what comes back, and what happens when one dies, hangs, or loses its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from aotgaudi.compile.cards import CardPool
from aotgaudi.compile.workers import Done, JobTimeoutError, LocalPool, WorkerDiedError
from aotgaudi.errors import CardError, CompileError, SpecError

pytestmark = pytest.mark.process

DEADLINE_SECONDS = 60.0


@dataclass(frozen=True)
class Call:
    """A job: a call of a function of this module."""

    function: Callable[..., Any]
    argument: Any = None

    def run(self) -> Any:
        return self.function() if self.argument is None else self.function(self.argument)


def double(number: int) -> int:
    return 2 * number


def process_id() -> int:
    return os.getpid()


def refuse() -> None:
    raise SpecError("limits.x", "is 1", "2")


def find_no_card() -> None:
    raise CardError("the card with module id 1 does not answer")


def stumble() -> None:
    raise RuntimeError("of a library")


def segfault() -> None:
    signal.raise_signal(signal.SIGSEGV)


def leave() -> None:
    os._exit(3)


def hang_in_a_child(path: Path) -> None:
    child = subprocess.Popen(["sleep", "600"])
    path.write_text(str(child.pid), encoding="ascii")
    child.wait()


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LocalPool]:
    with LocalPool(2, tmp_path, timeout_seconds=DEADLINE_SECONDS) as opened:
        yield opened


def next_done(pool: LocalPool) -> Done:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        found = pool.wait(0.2)
        if found:
            (done,) = found
            return done
    raise AssertionError("nothing came")


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # Whoever adopted it may reap it at any moment.
        return True


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not is_gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_results_come_back_with_their_tickets_and_a_process_serves_many_jobs(pool: LocalPool) -> None:
    pids = set()
    for ticket in range(5):
        pool.submit(ticket, Call(double, ticket))
        assert next_done(pool) == Done(ticket, 2 * ticket)
        pool.submit(100, Call(process_id))
        pids.add(next_done(pool).result)

    assert len(pids) == 1
    assert pids != {os.getpid()}


def test_nothing_to_do_is_no_process_and_an_empty_answer_in_time(pool: LocalPool) -> None:
    others, started = psutil.Process().children(), time.monotonic()

    assert pool.wait(0.1) == []

    assert 0.09 < time.monotonic() - started < 5
    assert psutil.Process().children() == others


def test_errors_of_ours_come_whole_and_others_as_compile_errors(pool: LocalPool) -> None:
    pool.submit(1, Call(refuse))
    error = next_done(pool).error
    assert isinstance(error, SpecError)
    assert error.where == "limits.x"

    pool.submit(2, Call(stumble))
    other = next_done(pool).error
    assert type(other) is CompileError
    assert str(other) == "RuntimeError: of a library"


def test_a_worker_that_got_no_card_is_replaced(pool: LocalPool) -> None:
    pool.submit(1, Call(process_id))
    first = next_done(pool).result
    pool.submit(2, Call(find_no_card))
    error = next_done(pool).error

    pool.submit(3, Call(process_id))
    second = next_done(pool).result

    assert isinstance(error, CardError)
    assert first != second
    assert is_gone(first)


@dataclass(frozen=True)
class NeedsCard:
    """A job that gets no card the first few times that one of these is run."""

    journal: Path
    without_card: tuple[int, ...]

    def run(self) -> int:
        with self.journal.open("a", encoding="ascii") as file:
            file.write("x")
        number = self.journal.stat().st_size
        if number in self.without_card:
            raise CardError("the card with module id 1 does not answer")
        return number


@pytest.mark.parametrize(
    ("without_card", "num_errors", "num_tries"), [((1,), 0, 5), ((1, 3), 0, 6), ((1, 2), 4, 2)]
)
def test_two_workers_in_a_row_that_get_no_card_end_all_that_wait_for_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    without_card: tuple[int, ...],
    num_errors: int,
    num_tries: int,
) -> None:
    monkeypatch.setattr("aotgaudi.compile.cards.usable_modules", lambda _: (1,))
    journal, done = tmp_path / "journal", []
    with CardPool(nullcontext(tmp_path), 1, tmp_path / "toolcache", DEADLINE_SECONDS) as cards:
        for ticket in range(4):
            cards.submit(ticket, NeedsCard(journal, without_card))
        while len(done) < 4:
            done += cards.wait(DEADLINE_SECONDS)

    assert sorted(one.ticket for one in done) == [0, 1, 2, 3]
    assert [isinstance(one.error, CardError) for one in done].count(True) == num_errors
    assert len(journal.read_text(encoding="ascii")) == num_tries


def test_what_waits_for_a_card_does_not_begin_when_the_build_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aotgaudi.compile.cards.usable_modules", lambda _: (1,))
    journal, done = tmp_path / "journal", []
    with CardPool(nullcontext(tmp_path), 3, tmp_path / "toolcache", DEADLINE_SECONDS) as cards:
        for ticket in range(cards.num_workers):
            cards.submit(ticket, NeedsCard(journal, ()))

        assert cards.withdraw() == [1, 2, 3]
        done += cards.wait(DEADLINE_SECONDS)
        assert cards.wait(0.0) == []

    assert [one.ticket for one in done] == [0]
    assert journal.read_text(encoding="ascii") == "x"


@pytest.mark.alone
@pytest.mark.parametrize(
    ("job", "exit_code", "message"),
    [(segfault, -11, "was killed by signal 11"), (leave, 3, "died (exit code 3)")],
    ids=["SIGSEGV", "exit"],
)
def test_a_worker_that_dies_is_noticed_at_once_and_replaced(
    pool: LocalPool, job: Callable[[], None], exit_code: int, message: str
) -> None:
    pool.submit(1, Call(double, 1))
    next_done(pool)
    started = time.monotonic()

    pool.submit(2, Call(job))
    done = next_done(pool)

    assert time.monotonic() - started < 1.0
    assert isinstance(done.error, WorkerDiedError)
    assert (done.ticket, done.error.exit_code) == (2, exit_code)
    assert str(done.error) == f"the worker process {message}"
    pool.submit(3, Call(double, 3))
    assert next_done(pool) == Done(3, 6)


def test_a_worker_that_is_killed_while_it_waits_costs_no_job(pool: LocalPool) -> None:
    """Nothing is shared by workers, so nothing is left in a state that others would meet."""
    for _ in range(5):
        pool.submit(1, Call(process_id))
        pid = next_done(pool).result
        os.kill(pid, signal.SIGKILL)
        wait_until_gone(pid)
        pool.submit(2, Call(double, 2))
        assert next_done(pool) == Done(2, 4)


@pytest.mark.alone
def test_killing_one_of_two_busy_workers_leaves_the_other_alone(pool: LocalPool, tmp_path: Path) -> None:
    pool.submit(1, Call(hang_in_a_child, tmp_path / "one"))
    pool.submit(2, Call(hang_in_a_child, tmp_path / "two"))
    while not (tmp_path / "two").exists() or not (tmp_path / "two").read_text(encoding="ascii"):
        assert pool.wait(0.05) == []
    child = psutil.Process(int((tmp_path / "two").read_text(encoding="ascii")))
    killed_at = time.monotonic()

    child.parent().kill()
    done = next_done(pool)

    assert done.ticket == 2
    assert time.monotonic() - killed_at < 1.0
    child.kill()


def test_a_job_that_hangs_is_killed_with_what_it_started_and_its_successor_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file, passed = tmp_path / "pid", [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0], sleep=time.sleep)
    monkeypatch.setattr("aotgaudi.compile.workers.time", clock)
    with LocalPool(1, tmp_path, timeout_seconds=DEADLINE_SECONDS) as pool:
        pool.submit(1, Call(hang_in_a_child, pid_file))
        while not pid_file.exists() or not pid_file.read_text(encoding="ascii"):
            assert pool.wait(0.05) == []
        passed[0] += DEADLINE_SECONDS
        done = next_done(pool)

        assert isinstance(done.error, JobTimeoutError)
        assert str(done.error) == "timed out"
        wait_until_gone(int(pid_file.read_text(encoding="ascii")))
        pool.submit(2, Call(double, 2))
        assert next_done(pool) == Done(2, 4)


def test_leaving_by_an_exception_kills_what_runs(tmp_path: Path) -> None:
    others, pid_file = psutil.Process().children(), tmp_path / "pid"

    def interrupted() -> None:
        with LocalPool(1, tmp_path) as pool:
            pool.submit(1, Call(hang_in_a_child, pid_file))
            while not pid_file.exists() or not pid_file.read_text(encoding="ascii"):
                pool.wait(0.02)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    wait_until_gone(int(pid_file.read_text(encoding="ascii")))
    assert psutil.Process().children() == others


def test_leaving_in_order_waits_for_no_job_that_still_runs(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with LocalPool(1, tmp_path) as pool:
        pool.submit(1, Call(hang_in_a_child, pid_file))
        while not pid_file.exists() or not pid_file.read_text(encoding="ascii"):
            assert pool.wait(0.05) == []
        began = time.monotonic()

    assert time.monotonic() - began < 20  # Idle workers may take 30 s to end.
    wait_until_gone(int(pid_file.read_text(encoding="ascii")))


_PARENT = """
import sys
from pathlib import Path
from aotgaudi.compile.workers import LocalPool
from tests.unit.compile.test_workers import Call, hang_in_a_child
pool = LocalPool(1, Path(sys.argv[1]))
pool.submit(1, Call(hang_in_a_child, Path(sys.argv[1]) / "pid"))
pool.wait(600)
"""


def test_a_worker_dies_with_its_parent_even_while_it_hangs(tmp_path: Path) -> None:
    """Else it would hold the lock of its unit for ever."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, str(tmp_path)], env=environment)
    pid_file = tmp_path / "pid"
    while not pid_file.exists() or not pid_file.read_text(encoding="ascii"):
        assert parent.poll() is None
        time.sleep(0.01)
    child = psutil.Process(int(pid_file.read_text(encoding="ascii")))
    worker = child.parent()
    assert worker is not None

    parent.kill()
    parent.wait()

    wait_until_gone(worker.pid)
    child.kill()
