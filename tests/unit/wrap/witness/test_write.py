from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from aotgaudi_witness.write import LINE_BYTES, EventFile, line_of, parts_of
from hypothesis import given
from hypothesis import strategies as st

texts = st.text(max_size=6000)
fields = st.dictionaries(
    st.sampled_from(["stack", "argv", "error", "why", "name", "path", "values", "what"]),
    st.one_of(texts, st.lists(texts, max_size=30), st.integers(), st.none()),
)


@given(fields)
def test_a_line_is_whole_shorter_than_the_limit_and_keeps_what_it_is(values: dict[str, Any]) -> None:
    head = {"e": "process", "n": 3, "pid": 1, "t": 0.5, "phase": "c"}

    line = line_of({**head, **values})

    assert len(line) < LINE_BYTES
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert {name: json.loads(line)[name] for name in head} == head


@given(fields)
def test_what_is_not_cut_is_told_as_it_is(values: dict[str, Any]) -> None:
    told = json.loads(line_of(values))

    assert told == values or told["cut"] is True


@given(st.dictionaries(st.text(max_size=60), st.text(max_size=400), max_size=300))
def test_parts_hold_all_values_between_them_and_each_fits_into_a_line(values: dict[str, str]) -> None:
    parts = list(parts_of(values))

    merged: dict[str, str] = {}
    for part in parts:
        assert not merged.keys() & part.keys()
        merged.update(part)
        assert "cut" not in json.loads(line_of({"e": "factors", "name": "x" * 100, "n": 1, "values": part}))
    assert merged == values


def test_lines_of_many_threads_are_whole_and_numbered_without_gaps(tmp_path: Path) -> None:
    file = EventFile(str(tmp_path), lambda: "c")
    threads = [
        threading.Thread(
            target=lambda i=i: [file.emit("process", argv=["x" * 3000, str(i)]) for _ in range(100)]
        )
        for i in range(8)
    ]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    numbers = [json.loads(line)["n"] for path in tmp_path.iterdir() for line in path.read_text().splitlines()]
    assert numbers == list(range(800))


def test_an_event_of_a_signal_handler_waits_for_the_one_that_it_interrupts(tmp_path: Path) -> None:
    """No deadlock, and no line inside another."""
    told: list[str] = []

    def phase() -> str:
        if len(told) < 3:
            told.append("again")
            file.emit("inner")
        return "c"

    file = EventFile(str(tmp_path), phase)
    file.emit("outer")

    (path,) = tmp_path.iterdir()
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [0, 1, 2, 3]


def test_an_event_that_cannot_be_written_leaves_a_gap_and_raises_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    file = EventFile(str(folder), lambda: "c")

    file.emit("hello")
    folder.mkdir()
    file.emit("process")

    (path,) = folder.iterdir()
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [1]


def test_a_value_that_json_does_not_know_is_told_as_text(tmp_path: Path) -> None:
    EventFile(str(tmp_path), lambda: "c").emit("process", argv=[tmp_path])

    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["argv"] == [str(tmp_path)]


def test_event_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    EventFile(str(tmp_path), lambda: "c").emit("hello")

    (path,) = tmp_path.iterdir()
    assert path.name.startswith(f"{os.getpid()}-")
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_no_error_of_the_guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = EventFile(str(tmp_path), lambda: "c")
    monkeypatch.setattr(file, "_descriptor", os.open("/dev/full", os.O_WRONLY))

    file.emit("process")
