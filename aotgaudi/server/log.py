"""The server's log, as text or JSON. Logging never blocks: lines that are not read in time are dropped and counted."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import time
from contextvars import ContextVar
from datetime import datetime, timezone
from logging.handlers import QueueHandler, QueueListener
from queue import Full, Queue
from typing import TextIO

from aotgaudi.server.options import LogFormat

REQUEST_ID: ContextVar[str | None] = ContextVar("aotgaudi_request_id", default=None)
"""The id of the request being handled; None outside of requests. Each request has its own task and so its own context."""

_MAX_HELD_LINES = 2048
_CLOSE_SECONDS = 1.0
_RETRY_SECONDS = 0.05


class _TextFormatter(logging.Formatter):
    """Writes ``2026-11-24 20:15:01 INFO message [request 0a1b]``. A `teller` stands before the level."""

    def __init__(self, teller: str = "") -> None:
        words = ("%(asctime)s", teller, "%(levelname)s", "%(message)s")
        super().__init__(" ".join(filter(None, words)), "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        """Part of logging: the line above a traceback."""
        line, request_id = super().formatMessage(record), _request_id_of(record)
        return line if request_id is None else f"{line} [request {request_id}]"


class _JsonFormatter(logging.Formatter):
    """Writes one JSON object a line: `time` (RFC 3339, UTC), `level`, `logger`, `message`, `request_id` and more.

    The attribute `fields` of a record is added, and its traceback as `exception`.
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
    """Returns the id of the record's request: the record's `request_id`, else that of the request being handled."""
    said: str | None = getattr(record, "request_id", None)
    return REQUEST_ID.get() if said is None else said


class DroppingHandler(QueueHandler):
    """Formats records on the thread that logs them. Another thread writes them to a file descriptor, which may block."""

    def __init__(self, descriptor: int, max_held_lines: int = _MAX_HELD_LINES) -> None:
        self._held: Queue[logging.LogRecord] = Queue(max_held_lines)
        super().__init__(self._held)
        self._num_dropped = 0
        _Writer(self._held, descriptor).start()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Part of logging: returns a record whose message is the whole formatted line."""
        try:
            line = self.format(record)
        except Exception:  # A record that cannot be formatted must not harm its caller.
            line = f"{record.levelname} a message that cannot be formatted: {record.msg!r}"
        prepared = copy.copy(record)
        prepared.msg, prepared.args, prepared.exc_info, prepared.exc_text = line, None, None, None
        return prepared

    def enqueue(self, record: logging.LogRecord) -> None:
        """Part of logging: queues the record, or drops it. Called under this handler's lock."""
        if self._num_dropped:
            record.msg = f"{self._num_dropped} lines were dropped: nobody read this log\n{record.msg}"
        try:
            self._held.put_nowait(record)
        except Full:
            self._num_dropped += 1
        else:
            self._num_dropped = 0

    def close(self) -> None:
        """Part of logging: waits at most a second until the queued lines are written."""
        with self._held.all_tasks_done:
            self._held.all_tasks_done.wait_for(lambda: not self._held.unfinished_tasks, _CLOSE_SECONDS)
        super().close()


class _Writer(QueueListener):
    """Writes records to a file descriptor, on a thread that may block.

    It holds no lock while it writes, neither that of `sys.stderr` nor that of a handler: Python would wait for it at exit.
    """

    def __init__(self, held: Queue[logging.LogRecord], descriptor: int) -> None:
        super().__init__(held)
        self._descriptor = descriptor

    def handle(self, record: logging.LogRecord) -> None:
        """Part of logging."""
        rest = memoryview(f"{record.msg}\n".encode("utf-8", "backslashreplace"))
        with contextlib.suppress(OSError):  # There is no other place to report it.
            while rest:
                try:
                    rest = rest[os.write(self._descriptor, rest) :]
                except BlockingIOError:  # Our parent has made the descriptor non-blocking.
                    time.sleep(_RETRY_SECONDS)


def log_handler(stream: TextIO | None, log_format: LogFormat = "text", teller: str = "") -> logging.Handler:
    """Returns a handler that writes a server's log to `stream`, its standard error (None if the process has none).

    If other programs write to the same stream, give a `teller`, which is named in each line of text.
    """
    handler = _writer(stream)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter(teller))
    return handler


def _writer(stream: TextIO | None) -> logging.Handler:
    if stream is None:
        return logging.NullHandler()
    try:
        return DroppingHandler(stream.fileno())
    except OSError:  # The stream is in memory.
        return logging.StreamHandler(stream)
