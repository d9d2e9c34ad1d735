"""A log that nobody waits for: what its reader does not take in time is dropped and counted."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from typing import TextIO

_MAX_HELD_BYTES = 1 << 20
_CLOSE_SECONDS = 1.0
_RETRY_SECONDS = 0.05


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


def log_handler(stream: TextIO | None) -> logging.Handler:
    """Returns what writes a server's log to `stream`, which is standard error; None where the process has none."""
    if stream is None:
        return logging.NullHandler()
    try:
        return DroppingHandler(stream.fileno())
    except OSError:  # No file, but something in memory.
        return logging.StreamHandler(stream)
