"""The last line that a server wrote, to its log or to the standard error that we pass on."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

from aotgaudi.wrap.events import printable

_TAIL_BYTES = 1 << 16
_DRAIN_SECONDS = 1.0


def last_line(tail: bytes, secrets: Iterable[bytes] = ()) -> str:
    """Returns the last line of an output without `secrets`; empty if the output is empty."""
    for secret in secrets:
        tail = tail.replace(secret, b"***")
    lines = [line for line in tail.decode(errors="replace").splitlines() if line.strip()]
    return printable(lines[-1].strip()) if lines else ""


def tail_of(path: Path) -> bytes:
    """Returns the end of a log. Raises OSError."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read()


class Relay(threading.Thread):
    """Copies what is written to `writer` byte by byte, and keeps the end of it. Ends when all writers have closed."""

    def __init__(self, to: int) -> None:
        super().__init__(name="aotgaudi-output", daemon=True)
        self._reader, self.writer = os.pipe()
        self._to, self._tail = to, b""

    def run(self) -> None:
        """Copies everything. If our own output is gone, it keeps reading, so that the server does not block."""
        while piece := os.read(self._reader, _TAIL_BYTES):
            self._tail = (self._tail + piece)[-_TAIL_BYTES:]
            try:
                while piece:
                    piece = piece[os.write(self._to, piece) :]
            except OSError:
                continue
        os.close(self._reader)

    def last_line(self) -> str:
        """Returns the last line, once the writers have closed or after a short wait."""
        self.join(_DRAIN_SECONDS)
        return last_line(self._tail)
