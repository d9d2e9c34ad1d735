"""Runs on the fake backend: what is compiled, how often, and what a fault leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from aotgaudi.backends.fake import probe
from aotgaudi.compile.plan import Plan, make_plan
from aotgaudi.compile.run import Progress, Watch, _describe, run_plan
from aotgaudi.compile.workers import Done, Job
from aotgaudi.entries import DefragEntry, PromptEntry
from aotgaudi.errors import CardError, CompileError, SpecError, StoreError
from aotgaudi.store.store import Store
from tests.unit.failing import raising
from tests.workload import PoolInThisProcess, compiles, execute, journaled, key_of, seeded_plan, tiny_spec

pytestmark = pytest.mark.process

DEADLINE_SECONDS = 300.0


def replan(plan: Plan, store: Store) -> Plan:
    entries = [entry for state in plan.programs for entry in state.entries]
    return make_plan(entries, tiny_spec(), plan.target, store)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        threading.Event().wait(0.002)


def test_equal_units_of_several_programs_compile_once_and_a_second_run_has_nothing_to_do(
    store: Store, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    target = journaled(journal)
    plan = seeded_plan(store, [("layer a", "head b"), ("layer a", "head c"), ("head b",)], target)

    outcome = execute(store, plan)

    units = {key_of(label, target) for label in ("layer a", "head b", "head c")}
    assert compiles(journal) == dict.fromkeys(units, 1)
    assert {row.label for row in outcome.compiled} == {"layer a", "head b", "head c"}
    assert (outcome.failures, outcome.interrupted, outcome.num_traced) == ((), False, 0)
    assert replan(plan, store).is_complete


def test_a_complete_plan_starts_no_process_and_says_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = seeded_plan(store, [("head a",)])
    execute(store, plan)
    monkeypatch.setattr(subprocess, "Popen", None)

    outcome = execute(store, replan(plan, store), on_progress=pytest.fail)

    assert (outcome.compiled, outcome.interrupted) == ((), False)


def test_a_unit_that_another_build_has_published_since_the_plan_is_not_compiled(
    store: Store, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    stale = seeded_plan(store, [("head a",)], journaled(journal))
    execute(store, stale)

    outcome = execute(store, stale)

    assert outcome.compiled == ()
    assert compiles(journal).total() == 1


def test_a_disk_without_room_for_the_build_is_told_before_anything_starts(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = seeded_plan(store, [("head a",), ("head b",)])
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5 << 18))

    with pytest.raises(
        StoreError, match=r"1\.25 MiB are free on its file system, and building 2 .* about 2\.00 MiB"
    ):
        execute(store, plan)


@pytest.mark.parametrize(
    ("output", "last"),
    [
        ("", ""),
        (
            "a.cpp:3:9: error: 'x' was not declared\n   3 | x;\n     | ^\n",
            "a.cpp:3:9: error: 'x' was not declared",
        ),
        ("ld: cannot find -lgomp\n", "ld: cannot find -lgomp"),
        (
            "a.cpp: error: first\ncollect2: error: ld returned 1 exit status\n",
            "collect2: error: ld returned 1 exit status",
        ),
    ],
)
def test_a_failed_unit_is_told_with_the_compilers_last_word(output: str, last: str) -> None:
    error = CompileError(f"head a: CppCompileError: C++ compile error\n\n{output and 'Command:'}\n{output}")

    told = _describe(error, "head a")

    assert told == "CppCompileError: C++ compile error" + (f": {last}" if last else "")


def test_faults_are_tried_twice_and_reported_with_their_log_while_the_others_go_on(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "journal"
    target = journaled(journal)
    faulty = ("layer !fail", "layer !die", "layer !hang", "layer !wrong")
    fine = tuple(f"head {n}" for n in range(6))
    plan = seeded_plan(store, [(*faulty, *fine)], target)
    passed = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0], sleep=time.sleep)
    monkeypatch.setattr("aotgaudi.compile.workers.time", clock)

    def let_time_pass_once_only_a_hanging_one_is_left(progress: Progress) -> None:
        """However long workers take to start, no other job's time ends."""
        num_hung = compiles(journal)[key_of("layer !hang", target)]
        if progress.labels == ("layer !hang",) and num_hung * DEADLINE_SECONDS > passed[0]:
            passed[0] += DEADLINE_SECONDS

    outcome = execute(
        store,
        plan,
        on_progress=let_time_pass_once_only_a_hanging_one_is_left,
        timeout_seconds=DEADLINE_SECONDS,
    )

    assert compiles(journal) == {
        **{key_of(label, target): 2 for label in faulty},
        **{key_of(label, target): 1 for label in fine},
    }
    assert {failure.label: failure.message for failure in outcome.failures} == {
        "layer !fail": "told to fail",
        "layer !die": "the worker process was killed by signal 9",
        "layer !hang": "timed out",
        "layer !wrong": "the compiled graph differs from eager by 1, allowed 0",
    }
    assert all(failure.log_path.is_file() for failure in outcome.failures)
    log = next(failure.log_path for failure in outcome.failures if failure.label == "layer !fail")
    assert "CompileError: layer !fail: told to fail" in log.read_text(encoding="utf-8")
    assert {row.label for row in outcome.compiled} == set(fine)
    assert not outcome.interrupted


def test_neither_a_failure_nor_a_wrong_result_leaves_a_trace_in_the_store(store: Store) -> None:
    plan = seeded_plan(store, [("layer !fail", "layer !wrong")])
    before = (set(store.actions), set(store.objects.digests()))

    execute(store, plan, workers=1)

    assert (set(store.actions), set(store.objects.digests())) == before
    assert list((store.root / "tmp").iterdir()) == []
    assert sorted(replan(plan, store).missing_units.values()) == ["layer !fail", "layer !wrong"]


def test_a_unit_whose_worker_is_killed_is_compiled_by_another_worker(store: Store, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    target = journaled(journal)
    plan = seeded_plan(store, [("layer !slow",)], target)
    killed: list[int] = []

    def kill_once(_: Progress) -> None:
        if not killed:
            killed.extend(workers_now())  # Before: to find them may take as long as to compile the unit.
            wait_until(lambda: compiles(journal).total() == 1)
            kill(killed)

    outcome = execute(store, plan, workers=1, on_progress=kill_once)

    assert killed
    assert [row.label for row in outcome.compiled] == ["layer !slow"]
    assert compiles(journal) == {key_of("layer !slow", target): 2}


def test_workers_that_die_while_they_start_are_replaced(store: Store) -> None:
    plan = seeded_plan(store, [("head a", "head b")])
    killed: list[int] = []

    def kill_once(_: Progress) -> None:
        if not killed:
            killed.extend(kill_workers())

    outcome = execute(store, plan, on_progress=kill_once)

    assert killed
    assert (len(outcome.compiled), outcome.failures) == (2, ())


def kill_workers() -> list[int]:
    pids = workers_now()
    kill(pids)
    return pids


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def workers_now() -> list[int]:
    children = psutil.Process().children()
    return [child.pid for child in children if any("aotgaudi.compile.workers" in x for x in child.cmdline())]


def test_a_stop_waits_for_the_units_under_way_and_the_next_run_does_the_rest(
    store: Store, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    target = journaled(journal)
    labels = [f"layer {n} !slow" for n in range(8)]
    plan = seeded_plan(store, [labels], target)

    first = execute(store, plan, should_stop=lambda: compiles(journal).total() >= 2)

    started = set(compiles(journal))
    assert first.interrupted
    assert 2 <= len(started) < len(labels)
    assert {key_of(row.label, target) for row in first.compiled} == started
    second = execute(store, replan(plan, store))
    assert not second.interrupted
    assert compiles(journal) == {key_of(label, target): 1 for label in labels}


def test_a_stop_before_the_first_unit_starts_no_process(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = seeded_plan(store, [("head a",)])
    monkeypatch.setattr(subprocess, "Popen", None)

    outcome = execute(store, plan, should_stop=lambda: True)

    assert (outcome.interrupted, outcome.compiled) == (True, ())


def test_a_worker_that_dies_of_the_signal_that_stops_the_build_is_no_failure(
    store: Store, tmp_path: Path
) -> None:
    """Not even on a second attempt: it is left for the next run."""
    journal = tmp_path / "journal"
    plan = seeded_plan(store, [("layer !hang", "head a")], journaled(journal))
    killed: list[int] = []

    def kill_each_attempt(_: Progress) -> None:
        if compiles(journal).total() > len(killed):
            killed.extend(kill_workers())

    outcome = execute(
        store, plan, workers=1, on_progress=kill_each_attempt, should_stop=lambda: len(killed) == 2
    )

    assert (outcome.interrupted, outcome.failures, outcome.compiled) == (True, (), ())
    assert set(replan(plan, store).missing_units.values()) == {"layer !hang", "head a"}


def test_progress_only_grows_and_ends_with_everything_done(store: Store) -> None:
    plan = seeded_plan(store, [("layer !fail", "head a"), ("head b",)])
    seen: list[Progress] = []

    execute(store, plan, on_progress=seen.append)

    counts = [(progress.num_done, progress.num_total) for progress in seen]
    assert counts == sorted(counts)
    assert counts[0] == (0, 3)
    assert counts[-1] == (3, 3)
    assert seen[-1].labels == ()
    assert seen[-1].eta_seconds == 0
    assert all(progress.eta_seconds >= 0 for progress in seen)


def test_costly_units_come_first(store: Store, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    target = journaled(journal)
    plan = seeded_plan(store, [("swap a", "head b", "sampler c", "layer d")], target)

    execute(store, plan, workers=1)

    order = ["layer d", "sampler c", "head b", "swap a"]
    assert journal.read_text(encoding="ascii").split() == [key_of(label, target) for label in order]


@pytest.mark.slow
def test_the_first_unit_comes_before_the_other_traces_since_later_ones_need_what_it_leaves(
    store: Store, tmp_path: Path
) -> None:
    entries = tuple(DefragEntry(number) for number in (1, 2, 4))
    plan = make_plan(entries, tiny_spec(), journaled(tmp_path / "journal"), store)
    seen: list[tuple[int, int]] = []

    outcome = execute(store, plan, workers=1, on_progress=lambda at: seen.append((at.num_done, at.num_total)))

    assert not outcome.failures
    assert (2, 4) in seen  # One trace of three, and its unit.
    assert (2, 5) not in seen


def test_a_model_that_cannot_be_traced_ends_the_build_once_with_its_own_error(store: Store) -> None:
    """The worker's SpecError arrives whole: where, what and the remedy."""
    entries = [PromptEntry(1, 16, 0), PromptEntry(1, 16, 1), DefragEntry(1)]
    unknown = tiny_spec().model_copy(
        update={"model": tiny_spec().model.model_copy(update={"config": {"model_type": "no-such-model"}})}
    )
    plan = make_plan(entries, unknown, probe(), store)

    with pytest.raises(SpecError) as caught:
        execute(store, plan, 1, spec=unknown)

    assert caught.value.where == "model.config.model_type"
    assert "no-such-model" in caught.value.problem
    assert set(store.actions) == set()


def test_a_store_that_takes_no_more_ends_the_build_and_keeps_what_there_is(store: Store) -> None:
    plan = seeded_plan(store, [[f"head {n}" for n in range(5)]])
    third = list(plan.missing_units)[2]
    in_the_way = store.actions.records.path(third).parent
    assert not in_the_way.exists()
    in_the_way.write_bytes(b"no directory")

    with pytest.raises(StoreError, match=r"cannot write .*Not a directory"):
        execute(store, plan, workers=1)

    in_the_way.unlink()
    assert len(replan(plan, store).units) == 2
    assert len(execute(store, replan(plan, store)).compiled) == 3


def test_no_card_ends_the_build_once_with_its_own_error(store: Store) -> None:
    plan = seeded_plan(store, [[f"head {n}" for n in range(5)]])
    pool = PoolWithoutCards(1)

    with pytest.raises(CardError, match="module id 1 is busy"):
        run_plan(plan, tiny_spec(), store, pool, Watch())

    assert pool.num_submitted == 1
    assert len(replan(plan, store).units) == 0


class PoolWithoutCards(PoolInThisProcess):
    """Finds for every job that its card is busy."""

    num_submitted = 0

    def submit(self, ticket: int, job: Job) -> None:
        self.num_submitted += 1
        self._done.append(Done(ticket, error=CardError("the card with module id 1 is busy")))


def test_processes_that_cannot_be_started_are_one_error(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = seeded_plan(store, [("head a",)])
    monkeypatch.setattr(subprocess, "Popen", raising(11))

    with pytest.raises(CompileError, match=r"cannot start worker processes: .*unavailable.*-j N"):
        execute(store, plan)


def test_a_second_interrupt_stops_the_workers_at_once(store: Store, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    plan = seeded_plan(store, [("layer !hang",)], journaled(journal))

    def interrupt(_: Progress) -> None:
        if compiles(journal):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(store, plan, workers=1, on_progress=interrupt, timeout_seconds=900)

    assert workers_now() == []


def test_a_label_of_any_length_has_a_log(store: Store) -> None:
    plan = seeded_plan(store, [("layer !fail " + "x" * 400,)])

    (failure,) = execute(store, plan, workers=1).failures

    assert failure.message == "told to fail"
    assert failure.log_path.is_file()


_TWO_BUILDERS = """
import json, sys
from pathlib import Path
from tests.workload import execute, seeded_plan
from aotgaudi.store.store import Store
if __name__ == "__main__":
    store = Store.open(Path(sys.argv[1]))
    labels = [f"head {n}" for n in range(20)]
    outcome = execute(store, seeded_plan(store, [labels[:10], labels[10:]]), 1)
    print(json.dumps([row.model_dump(mode="json", include={"label", "artifact"}) for row in outcome.compiled]))
    sys.exit(len(outcome.failures))
"""


def run_script(text: str, folder: Path, arguments: Sequence[str]) -> subprocess.Popen[str]:
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(path), *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_two_builds_on_one_store_agree_and_harm_nothing(store: Store, tmp_path: Path) -> None:
    processes = [run_script(_TWO_BUILDERS, tmp_path, [str(store.root)]) for _ in range(2)]
    done = [(process.communicate(timeout=DEADLINE_SECONDS), process.returncode) for process in processes]

    assert [(stderr, code) for (_, stderr), code in done] == [("", 0), ("", 0)]
    artifacts: dict[str, dict[str, str]] = {}
    for (stdout, _), _ in done:
        for row in json.loads(stdout):
            assert artifacts.setdefault(row["label"], row["artifact"]) == row["artifact"]
    assert len(artifacts) == 20
    assert make_plan([DefragEntry(1), DefragEntry(2)], tiny_spec(), probe(), store).is_complete
    for digest in store.objects.digests():
        store.objects.verify(digest)


_SEMAPHORE_OF_A_WORKER = """
import multiprocessing, sys
from pathlib import Path
from aotgaudi.compile.workers import LocalPool
KEPT = []
class MakeOne:
    def run(self):
        KEPT.append(multiprocessing.RLock())  # As torch's progress bars do.
if __name__ == "__main__":
    import script
    with LocalPool(2, Path(sys.argv[1])) as pool:
        for ticket in range(4):
            pool.submit(ticket, script.MakeOne())
            while not (done := pool.wait(1.0)):
                pass
            assert done[0].error is None, done
"""


def test_a_named_semaphore_of_a_worker_is_not_left_behind(tmp_path: Path) -> None:
    """A worker killed outright leaks it, and multiprocessing warns when the build exits."""
    process = run_script(_SEMAPHORE_OF_A_WORKER, tmp_path, [str(tmp_path)])

    _, stderr = process.communicate(timeout=DEADLINE_SECONDS)

    assert (process.returncode, stderr) == (0, "")
