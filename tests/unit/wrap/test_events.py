"""Lines that other processes write: read while they are written, never believed to be well-formed."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bundle.capture_receipt import Expected
from aotgaudi.wrap.adapters.vllm import VLLM
from aotgaudi.wrap.events import (
    MAX_LINE_BYTES,
    Event,
    EventLog,
    ProcessLog,
    hashed_factors,
    parse_line,
    printable,
)
from tests.launches import a_launch
from tests.unit.wrap.logs import event, history

NAME = "12-345.jsonl"


def line(number: int, kind: str = "trace", **values: object) -> bytes:
    return json.dumps({"e": kind, "n": number, "t": 1.5, "pid": 12, "phase": "l", **values}).encode() + b"\n"


def read(directory: Path) -> ProcessLog:
    log = EventLog(directory)
    log.read()
    return log.processes[NAME]


def test_a_line_is_an_event() -> None:
    assert parse_line(line(3, name="f")) == Event("trace", 3, 1.5, 12, "l", {"name": "f"})


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"{",
        b"\xff",
        b"[" * 100_000,
        line(0).replace(b"12", b"true"),
        line(0).replace(b'"l"', b"1"),
    ],
)
def test_what_is_no_event_is_none(text: bytes) -> None:
    assert parse_line(text) is None


@given(st.binary(max_size=200))
def test_no_line_breaks_the_reader(text: bytes) -> None:
    event = parse_line(text)

    assert event is None or isinstance(event, Event)


def test_files_are_read_as_they_grow(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    (tmp_path / "notes.txt").write_text("nobody's")
    path = tmp_path / NAME
    with path.open("ab", buffering=0) as file:
        file.write(line(0) + line(1)[:7])
        first = log.take_new()
        file.write(line(1)[7:])
        second = log.take_new()

    assert [event.number for event in first] == [0]
    assert [event.number for event in second] == [1]
    assert log.take_new() == []
    assert log.processes == {NAME: ProcessLog(12, (*first, *second))}


def test_a_file_without_a_word_is_a_process_that_has_said_nothing(tmp_path: Path) -> None:
    (tmp_path / NAME).touch()
    log = EventLog(tmp_path)

    log.read()

    assert log.processes == {NAME: ProcessLog(12)}


@pytest.mark.parametrize("data", [b"nonsense\n", b"x" * (MAX_LINE_BYTES + 1), line(0).replace(b"12", b"13")])
def test_what_cannot_be_read_is_counted(tmp_path: Path, data: bytes) -> None:
    (tmp_path / NAME).write_bytes(data)

    assert read(tmp_path) == ProcessLog(12, (), 1)


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/dev/zero"), os.mkfifo])
def test_what_is_not_a_file_is_not_followed(tmp_path: Path, make: object) -> None:
    make(tmp_path / NAME)  # type: ignore[operator]

    assert read(tmp_path) == ProcessLog(12, (), 1)


def test_a_process_by_its_last_words() -> None:
    def said(kind: str, **values: object) -> Event:
        return Event(kind, 0, 0, 12, "l", values)

    told = ProcessLog(
        12,
        (
            said("hello", role="Worker", hooks={"audit": True, "triton": "waiting"}),
            said("counters", values={"a": 1, "b": 1}),
            said("hooks", hooks={"triton": True}),
            said("counters", values={"a": 2, "odd": "x"}),
            said("loaded", what="aot", name="m"),
        ),
    )

    assert told.role == "Worker"
    assert told.hooks == {"audit": True, "triton": True}
    assert told.counters == {"a": 2, "b": 1}
    assert told.loads == {"aot:m": 1}


def test_what_people_read_is_one_printable_line() -> None:
    assert printable("a\nb\x1b[31m", 100) == "a b [31m"
    assert printable("x" * 600) == "x" * 497 + "..."


def test_a_directory_that_has_gone_makes_every_file_one_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / NAME).write_bytes(line(0, "hello"))
    log = EventLog(tmp_path / "events")
    log.read()

    shutil.rmtree(tmp_path / "events")
    log.read()

    assert log.processes[NAME].num_unreadable == 1


def test_what_a_server_hashed_is_told_without_credentials(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(line(0, "factors", name="envs", values={"PROXY": "http://u:pw@host/x"}))

    assert hashed_factors([read(tmp_path)]) == {"envs": {"PROXY": "http://host/x"}}


def test_a_proof_teaches_what_was_loaded_and_counted() -> None:
    def worker(pid: int, *counters: dict[str, int], **loaded: str) -> ProcessLog:
        events = [("counters", {"values": one}) for one in counters]
        events += [("loaded", {"what": kind, "name": name}) for kind, name in loaded.items()]
        return ProcessLog(pid, tuple(Event(kind, n, 0, pid, "l", v) for n, (kind, v) in enumerate(events)))

    workers = [worker(2, {"hits": 1, "other": 1}, {"hits": 2}, aot="m"), worker(3, {"hits": 1, "none": 0})]

    roles = {"Worker": 2}
    kind = replace(VLLM, roles=lambda _: roles, hooks=("audit",), counted=("hits", "none"), zeros=("misses",))

    assert kind.expected(a_launch(), workers) == Expected(
        loads={"aot:m": 1}, counters={"misses": 0, "hits": 3}, roles={"Worker": 2}, hooks=("audit",)
    )


@pytest.mark.parametrize(
    ("hello", "title"),
    [
        ({"role": "Worker", "name": "VllmWorker-1"}, "Worker 7 (VllmWorker-1)"),
        ({"role": "Worker"}, "Worker 7"),
        ({"role": "APIServer", "name": "MainProcess"}, "APIServer 7"),
        ({"role": "EngineCore", "name": "EngineCore", "of": "ApiServer_1"}, "EngineCore 7"),
        ({"role": "Worker", "name": "VllmWorker-1", "of": "EngineCore"}, "Worker 7 (VllmWorker-1)"),
        ({"role": "EngineCore", "name": "EngineCore_DP12"}, "EngineCore 7 (data-parallel rank 12)"),
        (
            {"role": "Worker", "name": "VllmWorker-0", "of": "EngineCore_DP0"},
            "Worker 7 (VllmWorker-0, data-parallel rank 0)",
        ),
        ({}, "process 7"),
    ],
)
def test_a_worker_is_called_by_its_rank_too(hello: dict[str, str], title: str) -> None:
    assert history(7, event("hello", **hello)).title == title
