"""A log that nobody waits for: what its reader does not take in time is dropped and counted. Its lines, as text or JSON."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import deque
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import Literal, TextIO

LogFormat = Literal["text", "json"]

REQUEST_ID: ContextVar[str | None] = ContextVar("aotgaudi_request_id", default=None)
"""The id of the request being handled, None outside of requests. Each request has its own task, so its own context."""

_MAX_HELD_BYTES = 1 << 20
_CLOSE_SECONDS = 1.0
_RETRY_SECONDS = 0.05


class _TextFormatter(logging.Formatter):
    """``20:15:01 INFO message [request 0a1b]``; with a `teller`, who is named before the level."""

    def __init__(self, teller: str = "") -> None:
        words = ("%(asctime)s", teller, "%(levelname)s", "%(message)s")
        super().__init__(" ".join(filter(None, words)), "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        """Part of logging: the line that stands above a traceback."""
        line, request_id = super().formatMessage(record), _request_id_of(record)
        return line if request_id is None else f"{line} [request {request_id}]"


class _JsonFormatter(logging.Formatter):
    """One JSON object a line: `time` (RFC 3339, UTC), `level`, `logger`, `message`, `request_id`, and what a record adds.

    A record adds what its `fields` hold; and `exception`, a traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Part of logging."""
        moment = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, object] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": _request_id_of(record),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


def _request_id_of(record: logging.LogRecord) -> str | None:
    """Which request a record is about: as it says, else the one that is being handled. None: about none."""
    said: str | None = getattr(record, "request_id", None)
    return REQUEST_ID.get() if said is None else said


class DroppingHandler(logging.Handler):
    """Writes records to a file descriptor from a thread of its own, which may block; who logs does not.

    Not through `sys.stderr`: whoever holds its lock while it blocks would keep the interpreter from ending.
    """

    def __init__(self, descriptor: int, max_held_bytes: int = _MAX_HELD_BYTES) -> None:
        super().__init__()
        self._descriptor, self._max_held_bytes = descriptor, max_held_bytes
        self._lines: deque[bytes] = deque()
        self._num_held_bytes = self._num_dropped = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._write_all, name="aotgaudi-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Part of logging: takes the record, or drops it."""
        try:
            line = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
        except Exception:  # A record that cannot be formatted must not harm whoever logged it.
            line = f"{record.levelname} a message that cannot be formatted: {record.msg!r}\n".encode()
        with self._changed:
            if self._num_held_bytes + len(line) > self._max_held_bytes:
                self._num_dropped += 1
                return
            if self._num_dropped:
                line = b"%d lines were dropped: nobody read this log\n%b" % (self._num_dropped, line)
                self._num_dropped = 0
            self._lines.append(line)
            self._num_held_bytes += len(line)
            self._changed.notify_all()

    def close(self) -> None:
        """Part of logging: waits for what was logged to be written, but not for long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_held_bytes, _CLOSE_SECONDS)
        super().close()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._lines))
                line = self._lines.popleft()
            self._write(line)
            with self._changed:
                self._num_held_bytes -= len(line)
                self._changed.notify_all()

    def _write(self, line: bytes) -> None:
        rest = memoryview(line)
        with contextlib.suppress(OSError):  # Nobody can be told.
            while rest:
                try:
                    rest = rest[os.write(self._descriptor, rest) :]
                except BlockingIOError:  # Whoever started us has made it so.
                    time.sleep(_RETRY_SECONDS)


def log_handler(stream: TextIO | None, log_format: LogFormat = "text", teller: str = "") -> logging.Handler:
    """Returns what writes a server's log to `stream`, which is standard error; None where the process has none.

    `teller`: who is named in each line of text, where others write to the same stream.
    """
    handler = _writer(stream)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter(teller))
    return handler


def _writer(stream: TextIO | None) -> logging.Handler:
    if stream is None:
        return logging.NullHandler()
    try:
        return DroppingHandler(stream.fileno())
    except OSError:  # No file, but something in memory.
        return logging.StreamHandler(stream)
