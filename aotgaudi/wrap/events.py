"""The event log. The agent in each process of a wrapped server writes one file, with one JSON object a line.

::

    <events>/<pid>-<start ns>.jsonl
    line   {"e": type, "n": number, "t": seconds, "pid": pid, "phase": state byte, ...}  shorter than PIPE_BUF

``n`` counts the lines of a file from 0 without a gap, so a lost event is noticed. When an agent sees that the state byte has
changed, it writes the server's counters and then ``state``. By then it has reported everything that came before. Other
processes write the lines, so we do not trust them to be well-formed, and count those that cannot be read.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aotgaudi.commands.variables import without_credentials
from aotgaudi.errors import shortened
from aotgaudi.files import open_descriptor

MAX_LINE_BYTES = 4096
"""PIPE_BUF: O_APPEND writes up to this many bytes in one piece, even from many threads."""
MAX_FILE_BYTES = 256 << 20
"""We do not read further in one process's file, and count the rest as unreadable."""

_NAME = re.compile(r"([0-9]{1,10})-([0-9]{1,20})\.jsonl")
_ENGINE = re.compile(r"EngineCore_DP([0-9]{1,6})")
_READ_BYTES = 1 << 20
_CORE = frozenset({"e", "n", "t", "pid", "phase"})


@dataclass(frozen=True, slots=True)
class Event:
    """One line. `kind` is its type, `number` its place in its file, `time` in monotonic seconds, `phase` a state byte."""

    kind: str
    number: int
    time: float
    pid: int
    phase: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """Returns a value as one printable line of at most 500 characters; empty if the event lacks it."""
        value = self.values.get(name)
        words = (
            map(str, value) if isinstance(value, (list, tuple)) else ([] if value is None else [str(value)])
        )
        return printable(" ".join(words))

    @property
    def stack(self) -> str:
        """The frames that caused the event, innermost first; empty if it names none."""
        frames = self.values.get("stack")
        return printable(" < ".join(map(str, frames))) if isinstance(frames, list) else self.text("stack")

    @property
    def path(self) -> str:
        """The path in the event, as the server sees it; empty if it names none."""
        return os.path.join(self.text("root"), self.text("path"))


@dataclass(frozen=True, slots=True)
class ProcessLog:
    """The events of one process, in order. `num_unreadable` counts lines that cannot be read."""

    pid: int
    events: tuple[Event, ...] = ()
    num_unreadable: int = 0

    @property
    def role(self) -> str:
        """The role that the process reported; empty before its ``hello``."""
        return self._said("role")

    @property
    def replica(self) -> str:
        """The data-parallel rank that a vLLM's engine or worker belongs to, in words; empty if it has none.

        vLLM names an engine ``EngineCore_DP1``, and its workers by their ranks below it (vllm/v1/engine/utils.py).
        """
        found = _ENGINE.fullmatch(self._said("name")) or _ENGINE.fullmatch(self._said("of"))
        return "" if found is None else f"data-parallel rank {found[1]}"

    @property
    def title(self) -> str:
        """Role, process id and ranks: ``Worker 4711 (VllmWorker-1)``, ``EngineCore 4712 (data-parallel rank 1)``."""
        ranks = ", ".join(filter(None, (self._said("name") if self.role == "Worker" else "", self.replica)))
        return f"{self.role or 'process'} {self.pid}{f' ({ranks})' if ranks else ''}"

    def _said(self, name: str) -> str:
        return next((event.text(name) for event in self.events if event.kind == "hello"), "")

    @property
    def hooks(self) -> Mapping[str, object]:
        """The hooks and whether each is in place, as last reported."""
        tables = self._tables("hooks", "hello", "hooks")
        return MappingProxyType({name: status for one in tables for name, status in one.items()})

    @property
    def counters(self) -> Mapping[str, int]:
        """The server's counters in this process, as last reported."""
        tables = self._tables("values", "counters")
        return MappingProxyType({n: v for one in tables for n, v in one.items() if isinstance(v, int)})

    def _tables(self, name: str, *kinds: str) -> Iterator[dict[str, Any]]:
        found = (event.values.get(name) for event in self.events if event.kind in kinds)
        return (one for one in found if isinstance(one, dict))

    @property
    def loads(self) -> Mapping[str, int]:
        """The artifacts that this process has loaded: ``KIND:NAME`` -> how often."""
        loaded = (event for event in self.events if event.kind == "loaded")
        return Counter(f"{event.text('what')}:{event.text('name')}" for event in loaded)


def hashed_factors(processes: Iterable[ProcessLog]) -> dict[str, dict[str, str]]:
    """Returns what a server hashed: name -> factor -> its value or the value's digest, as text without credentials."""
    found: dict[str, dict[str, str]] = {}
    for process in processes:
        for event in process.events:
            values = event.values.get("values")
            if event.kind == "factors" and isinstance(values, dict):
                texts = {str(name): without_credentials(str(value)) for name, value in values.items()}
                found.setdefault(event.text("name"), {}).update(texts)
    return found


def printable(text: str, max_characters: int = 500) -> str:
    """Returns `text` as one line of printable characters, truncated to `max_characters`."""
    line = "".join(char if char.isprintable() else " " for char in text)
    return shortened(line, max_characters)


def parse_line(line: bytes) -> Event | None:
    """Returns the event of one line; None if the line is not an event."""
    try:
        raw = json.loads(line)
        kind, number, time, pid, phase = (raw[name] for name in ("e", "n", "t", "pid", "phase"))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not (isinstance(kind, str) and isinstance(phase, str) and isinstance(time, (int, float))):
        return None
    if type(number) is not int or type(pid) is not int:
        return None
    return Event(kind, number, float(time), pid, phase, {n: v for n, v in raw.items() if n not in _CORE})


class EventLog:
    """Reads a growing directory of events and keeps all of them. For one thread only.

    Attributes:
        processes: File name -> what that process has reported so far.
        written: The paths that processes opened for writing, or put a file at, as the server sees them.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, _File] = {}
        self._new: list[Event] = []
        self.processes: dict[str, ProcessLog] = {}
        self.written: set[str] = set()

    def read(self) -> None:
        """Reads what was written since the last call.

        A line that is still being written is left for the next call. If the directory has gone, its files can no longer be
        read.
        """
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._directory):
                matched = _NAME.fullmatch(entry.name)
                if matched is not None and entry.name not in self._files:
                    self._files[entry.name] = _File(Path(entry.path), int(matched[1]))
                    self.processes[entry.name] = ProcessLog(int(matched[1]))
        for name, file in self._files.items():
            events, num_unreadable = file.read()
            if events or num_unreadable:
                before = self.processes[name]
                self.processes[name] = replace(
                    before,
                    events=(*before.events, *events),
                    num_unreadable=before.num_unreadable + num_unreadable,
                )
                self._new += events
                self.written.update(event.path for event in events if event.kind == "write")

    def take_new(self) -> list[Event]:
        """Reads, and returns by time the events that this method has not returned before."""
        self.read()
        new, self._new = self._new, []
        return sorted(new, key=lambda event: event.time)


class _File:
    """One process's file, of which we have read up to `_offset`."""

    def __init__(self, path: Path, pid: int) -> None:
        self._path, self._pid = path, pid
        self._offset = 0
        self._rest = b""

    def read(self) -> tuple[tuple[Event, ...], int]:
        """Returns the new events, and how many new lines cannot be read."""
        try:
            descriptor = open_descriptor(self._path)
        except OSError:  # It has gone, or is a link.
            return (), 1
        try:
            data = self._new_bytes(descriptor)
        finally:
            os.close(descriptor)
        if self._offset > MAX_FILE_BYTES:
            return (), 1
        *lines, self._rest = (self._rest + data).split(b"\n")
        num_unreadable = 0
        if len(self._rest) > MAX_LINE_BYTES:
            self._rest, num_unreadable = b"", 1
        events = [parse_line(line) for line in lines]
        whole = tuple(event for event in events if event is not None and event.pid == self._pid)
        return whole, num_unreadable + len(events) - len(whole)

    def _new_bytes(self, descriptor: int) -> bytes:
        pieces = []
        while self._offset <= MAX_FILE_BYTES:
            piece = os.pread(descriptor, _READ_BYTES, self._offset)
            if not piece:
                break
            pieces.append(piece)
            self._offset += len(piece)
        return b"".join(pieces)
