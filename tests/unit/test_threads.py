"""How many threads compute, and how long waiting ones spin."""

from __future__ import annotations

from pathlib import Path

import pytest

from aotgaudi.machine import bound_spinning, choose_threads, num_running_elsewhere


@pytest.mark.parametrize(
    ("others", "num", "why"),
    [
        (0, 2, "one for each core"),
        (None, 2, "one for each core"),
        (1, 1, "1 other task keeps cores busy, of 2"),
        (9, 1, "9 other tasks keep cores busy, of 2"),
    ],
)
def test_cores_that_others_keep_busy_get_no_thread(
    monkeypatch: pytest.MonkeyPatch, others: int | None, num: int, why: str
) -> None:
    monkeypatch.setattr("aotgaudi.machine.available_cores", lambda: 2)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("aotgaudi.machine.num_running_elsewhere", lambda children: others)

    found = choose_threads({})

    assert found.num == num
    assert why in str(found)


def test_of_a_large_machine_only_cores_beyond_the_free_ones_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A container with a quota of 2 on 64 cores, of which 30 are busy."""
    monkeypatch.setattr("aotgaudi.machine.available_cores", lambda: 2)
    monkeypatch.setattr("os.cpu_count", lambda: 64)

    for num_busy, num in ((30, 2), (63, 1)):
        monkeypatch.setattr("aotgaudi.machine.num_running_elsewhere", lambda _, num=num_busy: num)
        assert choose_threads({}).num == num


def test_a_number_of_threads_that_was_asked_for_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_: object) -> int:
        raise AssertionError("nothing has to be measured")

    monkeypatch.setattr("aotgaudi.machine.num_running_elsewhere", never)

    asked = choose_threads({"OMP_NUM_THREADS": "3"})

    assert str(asked) == "matrix products use 3 threads: OMP_NUM_THREADS"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("cpu 1 2\nprocs_running 4\n", 3), ("procs_running 1\n", 0), ("cpu 1\n", None), (None, None)],
)
def test_tasks_that_run_elsewhere_are_those_of_the_kernel_but_for_our_own(
    tmp_path: Path, text: str | None, expected: int | None
) -> None:
    if text is not None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc" / "stat").write_text(text)

    assert num_running_elsewhere(root=tmp_path) == expected


def test_what_a_child_runs_is_not_elsewhere(tmp_path: Path) -> None:
    tasks = {"7": "7 (python3) S 1", "8": "8 (a) R) R 1", "9": "9 (dlopen) R 1"}
    for name, text in tasks.items():
        (tmp_path / "proc/7/task" / name).mkdir(parents=True)
        (tmp_path / "proc/7/task" / name / "stat").write_text(text)
    (tmp_path / "proc/stat").write_text("procs_running 4\n")

    assert num_running_elsewhere([7], tmp_path) == 1
    assert num_running_elsewhere([7, 8], tmp_path) == 1  # That one has ended.


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_spinning_is_bounded_unless_the_user_has_said_something(
    given: dict[str, str], expected: str | None
) -> None:
    environ = dict(given)

    bound_spinning(environ)

    assert environ.get("GOMP_SPINCOUNT") == expected
