"""Lines that other processes write: read while they are written, never believed to be well-formed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.wrap.events import (
    MAX_LINE_BYTES,
    Event,
    EventLog,
    EventReader,
    ProcessLog,
    hashed_factors,
    parse_line,
    printable,
)

NAME = "12-345.jsonl"


def line(number: int, kind: str = "trace", **values: object) -> bytes:
    return json.dumps({"e": kind, "n": number, "t": 1.5, "pid": 12, "phase": "l", **values}).encode() + b"\n"


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
    reader, account = EventReader(tmp_path), EventLog()
    (tmp_path / "notes.txt").write_text("nobody's")
    path = tmp_path / NAME
    with path.open("ab", buffering=0) as file:
        file.write(line(0) + line(1)[:7])
        first = account.add(reader.read())
        file.write(line(1)[7:])
        second = account.add(reader.read())

    assert [event.number for event in first] == [0]
    assert [event.number for event in second] == [1]
    assert account.add(reader.read()) == []
    assert account.histories == {NAME: ProcessLog(12, (*first, *second))}


def test_a_file_without_a_word_is_a_process_that_has_said_nothing(tmp_path: Path) -> None:
    (tmp_path / NAME).touch()
    account = EventLog()

    account.add(EventReader(tmp_path).read())

    assert account.histories == {NAME: ProcessLog(12)}


@pytest.mark.parametrize("data", [b"nonsense\n", b"x" * (MAX_LINE_BYTES + 1), line(0).replace(b"12", b"13")])
def test_what_cannot_be_read_is_counted(tmp_path: Path, data: bytes) -> None:
    (tmp_path / NAME).write_bytes(data)

    assert EventReader(tmp_path).read() == {NAME: ProcessLog(12, (), 1)}


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/dev/zero"), os.mkfifo])
def test_what_is_not_a_file_is_not_followed(tmp_path: Path, make: object) -> None:
    make(tmp_path / NAME)  # type: ignore[operator]

    told = EventReader(tmp_path).read()[NAME]

    assert told.events == ()


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
    reader, account = EventReader(tmp_path / "events"), EventLog()
    account.add(reader.read())

    shutil.rmtree(tmp_path / "events")
    account.add(reader.read())

    assert account.histories[NAME].num_unreadable == 1


def test_what_a_guest_hashed_is_told_without_credentials(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(line(0, "factors", name="envs", values={"PROXY": "http://u:pw@host/x"}))
    account = EventLog()
    account.add(EventReader(tmp_path).read())

    assert hashed_factors(account.histories.values()) == {"envs": {"PROXY": "http://host/x"}}
