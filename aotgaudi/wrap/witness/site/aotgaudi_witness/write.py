"""One file of events for each process: a line of JSON for each, appended whole.

A line is shorter than `LINE_BYTES` and written by one system call to a file that is open for appending. Nobody waits for
anybody: where one thread is writing, others leave their events with it. So the writer may be called inside a signal handler,
or while memory is collected. Events are numbered in the order in which they are written. One that could not be written, on a
full disk say, leaves a gap that whoever reads the file sees. The format: docs/formats/witness-events.md.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

LINE_BYTES = 4096
"""A line is shorter than this, its newline included: PIPE_BUF of Linux."""

_SHORTENED = (
    ("stack", 1400),
    ("argv", 1200),
    ("error", 600),
    ("why", 400),
    ("name", 200),
    ("path", 1200),
    ("requests", 1200),
)
_BYTES_FOR_VALUES = 3000


class EventFile:
    """Appends events to a file of this process. Thread-safe; never raises."""

    def __init__(self, folder: str, phase: Callable[[], str]) -> None:
        """Creates no file yet. `phase` says what the guest is at."""
        self._folder, self._phase = folder, phase
        self.renew()

    def renew(self) -> None:
        """Begins a file of its own: in a new process, and in a child after a fork, whose file is its parent's."""
        self._pid = os.getpid()
        self._number = 0
        self._path = os.path.join(self._folder, f"{self._pid}-{time.time_ns()}.jsonl")
        self._descriptor = -1
        self._waiting: deque[dict[str, Any]] = deque()
        self._writing = threading.Lock()

    def emit(self, kind: str, **fields: Any) -> None:
        """Appends one event."""
        self._waiting.append({"e": kind, "t": round(time.monotonic(), 4), "phase": self._phase(), **fields})
        while self._waiting and self._writing.acquire(blocking=False):
            try:
                self._write_waiting()
            finally:
                self._writing.release()

    def _write_waiting(self) -> None:
        while self._waiting:
            event = self._waiting.popleft()
            number, self._number = self._number, self._number + 1
            try:
                line = line_of({"e": event["e"], "n": number, "pid": self._pid, **event})
                if self._descriptor < 0:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                    self._descriptor = os.open(self._path, flags, 0o600)
                os.write(self._descriptor, line)
            except Exception:  # noqa: S110 - the gap in the numbers says it
                pass


def line_of(record: Mapping[str, Any]) -> bytes:
    """Returns the line of an event. What is too long is cut, and the event says so by ``"cut": true``."""
    line = _encoded(record)
    if len(line) < LINE_BYTES:
        return line
    shorter = {**record, "cut": True}
    for name, size in _SHORTENED:
        if name in shorter:
            shorter[name] = _cut(shorter[name], size)
    line = _encoded(shorter)
    if len(line) < LINE_BYTES:
        return line
    return _encoded(
        {**{name: record[name] for name in ("e", "n", "pid", "t", "phase") if name in record}, "cut": True}
    )


def parts_of(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields `values` in parts that fit into a line each; one empty part where there are none."""
    part: dict[str, Any] = {}
    size = 0
    for name, value in values.items():
        more = len(json.dumps([name, value], default=str))
        if part and size + more > _BYTES_FOR_VALUES:
            yield part
            part, size = {}, 0
        part[name] = value
        size += more
    yield part


def _encoded(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, default=str, separators=(",", ":")).encode("ascii") + b"\n"


def _cut(value: Any, size: int) -> Any:
    """Returns as much of a text, or of a list of texts, as takes about `size` bytes."""
    if isinstance(value, str):
        encoded = json.dumps(value)
        return value if len(encoded) <= size else value[: max(1, size * len(value) // len(encoded))]
    if isinstance(value, (list, tuple)):
        kept: list[Any] = []
        for item in value:
            size -= len(json.dumps(item, default=str)) + 1
            if size < 0:
                break
            kept.append(item)
        return kept
    return value
