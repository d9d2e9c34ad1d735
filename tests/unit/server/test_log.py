"""A log whose reader is slow, absent or gone."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import time
from collections.abc import Iterator

import pytest

from aotgaudi.server.log import DroppingHandler, log_handler


def record(message: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord("name", logging.INFO, __file__, 1, message, args, None)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for descriptor in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def test_lines_are_written_in_order_before_the_end(pipe: tuple[int, int]) -> None:
    handler = DroppingHandler(pipe[1])

    for number in range(100):
        handler.handle(record("line %d \u20ac \ud800", number))
    handler.close()

    lines = os.read(pipe[0], 1 << 16).decode().splitlines()
    assert lines == [f"line {number} \u20ac \\ud800" for number in range(100)]


@pytest.mark.parametrize("is_blocking", [True, False])
def test_what_nobody_reads_is_dropped_and_counted(pipe: tuple[int, int], is_blocking: bool) -> None:
    os.set_blocking(pipe[1], is_blocking)
    handler = DroppingHandler(pipe[1], max_held_lines=10)

    started = time.monotonic()
    for _ in range(2000):
        handler.handle(record("x" * 99))
    handler.close()
    assert time.monotonic() - started < 5

    received = b""
    os.set_blocking(pipe[0], False)
    while not received.endswith(b"again\n"):
        with contextlib.suppress(BlockingIOError):
            received += os.read(pipe[0], 1 << 16)
        if received.count(b"\n") and handler._held.empty():
            handler.handle(record("again"))
    dropped = [int(line.split()[0]) for line in received.splitlines() if b"were dropped" in line]
    assert sum(dropped) + received.count(b"x" * 99) == 2000
    assert sum(dropped) > 1000


def test_a_reader_that_is_gone_is_no_error(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    handler = DroppingHandler(pipe[1])

    handler.handle(record("lost"))
    handler.close()


def test_a_record_that_cannot_be_formatted_is_said_as_it_is(pipe: tuple[int, int]) -> None:
    handler = DroppingHandler(pipe[1])

    handler.handle(record("%d of %d", 1))
    handler.close()

    assert b"'%d of %d'" in os.read(pipe[0], 1000)


def test_the_log_goes_where_standard_error_is() -> None:
    memory = io.StringIO()
    log_handler(memory).handle(record("said"))

    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO said\n", memory.getvalue())
    log_handler(memory, teller="aotgaudi").handle(record("said"))
    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d aotgaudi INFO said$", memory.getvalue(), re.MULTILINE)
    assert isinstance(log_handler(None), logging.NullHandler)
