"""Each unit is compiled once: locks, a second look, and what happens when another builder is at it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from aotgaudi.backends.fake.probe import probe
from aotgaudi.build.jobs import Built, Busy, CompileJob, build_once, find_row, is_busy
from aotgaudi.build.run import Progress
from aotgaudi.errors import CompileError
from aotgaudi.store.store import Store
from tests.workload import execute, key_of, seeded_plan, text_of


def job_of(store: Store, label: str = "head a", journal: Path | None = None) -> CompileJob:
    target = probe({"journal": str(journal)} if journal else None)
    text = str(store.objects.put_bytes(text_of(label).encode()))
    log_path = store.root / "logs" / "unit.log"
    return CompileJob(key_of(label, target), text, label, target, store.root, log_path)


def test_the_first_compiles_and_records_and_the_second_finds_it(store: Store, tmp_path: Path) -> None:
    job = job_of(store, journal=tmp_path / "journal")

    first, second = build_once(job), build_once(job)

    assert isinstance(first, Built)
    assert isinstance(second, Built)
    assert (first.is_new, second.is_new) == (True, False)
    assert first.row == second.row == find_row(store, job)
    assert (tmp_path / "journal").read_text(encoding="ascii").split() == [job.key]


def test_a_unit_that_another_builder_is_at_is_left_to_it_and_its_log_is_not_touched(store: Store) -> None:
    job = job_of(store)
    job.log_path.parent.mkdir(exist_ok=True)
    job.log_path.write_text("of the other", encoding="ascii")

    with store.try_unit_lock(job.key):
        assert is_busy(store, job)
        assert build_once(job) == Busy()

    assert job.log_path.read_text(encoding="ascii") == "of the other"
    assert not is_busy(store, job)
    assert find_row(store, job) is None


def test_a_failure_is_not_recorded_and_frees_the_lock(store: Store) -> None:
    job = job_of(store, "head !fail")

    for _ in range(2):
        with pytest.raises(CompileError, match="told to fail"):
            build_once(job)

    assert find_row(store, job) is None
    assert not is_busy(store, job)


def test_a_build_works_on_the_rest_while_another_has_a_unit_and_then_takes_its_result(store: Store) -> None:
    plan = seeded_plan(store, [("layer a", "head b", "head c")])
    seen: list[Progress] = []

    def other() -> None:
        with store.try_unit_lock(key_of("layer a")):
            taken.set()
            while not all(store.actions.get(key_of(label)) for label in ("head b", "head c")):
                time.sleep(0.01)
            time.sleep(0.3)
            store.actions.put(key_of("layer a"), row)

    outcome_of_other = execute(store, seeded_plan(store, [("layer a",)]), 1)
    row = outcome_of_other.compiled[0].model_dump(mode="json")
    store.actions.discard(key_of("layer a"))
    plan = seeded_plan(store, [("layer a", "head b", "head c")])
    taken = threading.Event()
    thread = threading.Thread(target=other)
    thread.start()
    taken.wait()
    outcome = execute(store, plan, 1, on_progress=seen.append)
    thread.join()

    assert Counter(row.label for row in outcome.compiled) == {"head b": 1, "head c": 1}
    assert (outcome.failures, outcome.interrupted) == ((), False)
    assert any(progress.labels == ("layer a",) for progress in seen), "it waited, and said for what"
    assert seen[-1].num_done == seen[-1].num_total == 3


def test_a_builder_that_leaves_without_a_result_is_succeeded(store: Store) -> None:
    plan = seeded_plan(store, [("layer a",)])
    taken = threading.Event()

    def other() -> None:
        with store.try_unit_lock(key_of("layer a")):
            taken.set()
            time.sleep(1.0)

    thread = threading.Thread(target=other)
    thread.start()
    taken.wait()
    outcome = execute(store, plan, 1)
    thread.join()

    assert [row.label for row in outcome.compiled] == ["layer a"]


def test_a_stop_while_others_are_at_work_does_not_wait_for_them(store: Store) -> None:
    plan = seeded_plan(store, [("layer a",)])
    seen: list[Progress] = []

    with store.try_unit_lock(key_of("layer a")):
        outcome = execute(store, plan, 1, should_stop=lambda: len(seen) > 3, on_progress=seen.append)

    assert outcome.interrupted
