"""What witnesses say: one file a process, one JSON object a line, read while it is written.

::

    <events>/<pid>-<start ns>.jsonl
    line   {"e": type, "n": number, "t": seconds, "pid": pid, "phase": state byte, ...}  shorter than PIPE_BUF

``n`` counts the lines of a file from 0 without a gap, so an event that was lost is missed. The witness writes
``state`` when it sees that the state byte has changed, after the guest's counters: it has then said all of what was before.
Lines are what other processes wrote: none is believed to be well-formed, and what cannot be read is counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aotgaudi.files import open_descriptor
from aotgaudi.wrap.variables import without_credentials

MAX_LINE_BYTES = 4096
"""PIPE_BUF: what O_APPEND writes whole, from many threads."""
MAX_FILE_BYTES = 256 << 20
"""Of one process's events; what is beyond is not read, and counts as unreadable."""

_NAME = re.compile(r"([0-9]{1,10})-([0-9]{1,20})\.jsonl")
_READ_BYTES = 1 << 20
_CORE = frozenset({"e", "n", "t", "pid", "phase"})


@dataclass(frozen=True, slots=True)
class Event:
    """One line: `kind` is its type, `number` its place in its file, `time` monotonic seconds, `phase` a state byte."""

    kind: str
    number: int
    time: float
    pid: int
    phase: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """Returns a value as text, for people: one printable line, at most 500 characters; empty where there is none."""
        value = self.values.get(name)
        words = (
            map(str, value) if isinstance(value, (list, tuple)) else ([] if value is None else [str(value)])
        )
        return printable(" ".join(words))

    @property
    def stack(self) -> str:
        """The frames that it came from, the innermost first; empty where it names none."""
        frames = self.values.get("stack")
        return printable(" < ".join(map(str, frames))) if isinstance(frames, list) else self.text("stack")

    @property
    def path(self) -> str:
        """The path that it is about, as the guest sees it; empty where it is about none."""
        return os.path.join(self.text("root"), self.text("path"))


@dataclass(frozen=True, slots=True)
class ProcessLog:
    """What one process said, in the order in which it was written; `num_unreadable` counts lines that say nothing."""

    pid: int
    events: tuple[Event, ...] = ()
    num_unreadable: int = 0

    @property
    def role(self) -> str:
        """The process's role by its own word; empty before it has said ``hello``."""
        return next((event.text("role") for event in self.events if event.kind == "hello"), "")

    @property
    def hooks(self) -> Mapping[str, object]:
        """What is hooked, by its last word."""
        hooks: dict[str, object] = {}
        for event in self.events:
            found = event.values.get("hooks") if event.kind in ("hello", "hooks") else None
            if isinstance(found, dict):
                hooks.update(found)
        return MappingProxyType(hooks)

    @property
    def counters(self) -> Mapping[str, int]:
        """The guest's own counters in this process, by its last word."""
        counters: dict[str, int] = {}
        for event in self.events:
            found = event.values.get("values") if event.kind == "counters" else None
            if isinstance(found, dict):
                counters.update({n: v for n, v in found.items() if isinstance(v, int)})
        return MappingProxyType(counters)

    @property
    def loads(self) -> Mapping[str, int]:
        """Artifacts that this process has loaded, ``KIND:NAME``, and how often."""
        loaded = (event for event in self.events if event.kind == "loaded")
        return Counter(f"{event.text('what')}:{event.text('name')}" for event in loaded)


def hashed_factors(histories: Iterable[ProcessLog]) -> dict[str, dict[str, str]]:
    """Returns what a guest hashed, as text without credentials: name -> factor -> its value, or the value's digest."""
    found: dict[str, dict[str, str]] = {}
    for history in histories:
        for event in history.events:
            values = event.values.get("values")
            if event.kind == "factors" and isinstance(values, dict):
                told = {str(name): without_credentials(str(value)) for name, value in values.items()}
                found.setdefault(event.text("name"), {}).update(told)
    return found


def printable(text: str, max_characters: int = 500) -> str:
    """Returns `text` as one line of printable characters, cut."""
    line = "".join(char if char.isprintable() else " " for char in text)
    return line if len(line) <= max_characters else line[: max_characters - 3] + "..."


def parse_line(line: bytes) -> Event | None:
    """Returns the event of one line; None for one that is none."""
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


class EventReader:
    """Reads a directory of events as it grows. One thread only."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, _File] = {}

    def read(self) -> Mapping[str, ProcessLog]:
        """Returns what was written since the last call: file name -> what is new in it, also where that is nothing.

        A line that is still being written is left for the next call. Where the directory has gone, every file that was in
        it is one that cannot be read.
        """
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._directory):
                matched = _NAME.fullmatch(entry.name)
                if matched is not None and entry.name not in self._files:
                    self._files[entry.name] = _File(Path(entry.path), int(matched[1]))
        return {name: file.read() for name, file in self._files.items()}


class EventLog:
    """Everything that all processes have said so far. One thread only."""

    def __init__(self) -> None:
        self.histories: dict[str, ProcessLog] = {}

    def add(self, news: Mapping[str, ProcessLog]) -> list[Event]:
        """Takes in what an `EventReader` gave; returns the new events, by time."""
        new: list[Event] = []
        for name, more in news.items():
            before = self.histories.get(name, ProcessLog(more.pid))
            if more.events or more.num_unreadable or name not in self.histories:
                self.histories[name] = replace(
                    before,
                    events=before.events + more.events,
                    num_unreadable=before.num_unreadable + more.num_unreadable,
                )
            new += more.events
        return sorted(new, key=lambda event: event.time)


class _File:
    """One process's file, read up to `_offset`."""

    def __init__(self, path: Path, pid: int) -> None:
        self._path, self._pid = path, pid
        self._offset = 0
        self._rest = b""

    def read(self) -> ProcessLog:
        try:
            descriptor = open_descriptor(self._path)
        except OSError:  # Gone, or a link: the hole in its numbers, or its silence, tells.
            return ProcessLog(self._pid, (), 1)
        try:
            data = self._new_bytes(descriptor)
        finally:
            os.close(descriptor)
        if self._offset > MAX_FILE_BYTES:
            return ProcessLog(self._pid, (), 1)
        *lines, self._rest = (self._rest + data).split(b"\n")
        num_unreadable = 0
        if len(self._rest) > MAX_LINE_BYTES:
            self._rest, num_unreadable = b"", 1
        events = [parse_line(line) for line in lines]
        whole = tuple(event for event in events if event is not None and event.pid == self._pid)
        return ProcessLog(self._pid, whole, num_unreadable + len(events) - len(whole))

    def _new_bytes(self, descriptor: int) -> bytes:
        pieces = []
        while self._offset <= MAX_FILE_BYTES:
            piece = os.pread(descriptor, _READ_BYTES, self._offset)
            if not piece:
                break
            pieces.append(piece)
            self._offset += len(piece)
        return b"".join(pieces)
