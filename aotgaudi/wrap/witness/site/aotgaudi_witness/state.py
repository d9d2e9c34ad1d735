"""What the guest is at, as whoever started it says: one byte in a file; and the thread that looks at it.

========  ======================================================================================
byte      meaning
========  ======================================================================================
``c``     cold: caches are empty, and compiling is what is wanted
``l``     load: from sealed files, before the server is healthy; what compiles is refused
``m``     measure: as load, but what compiles is reported
``e``     exercise: healthy, and asked what it was asked when it was built; what compiles is reported
``v``     live: what compiles is reported
``r``     live, and what compiles is refused
``f``     flush: caches that are written late are to be written now
``s``     stop: nothing more will come
========  ======================================================================================
"""

from __future__ import annotations

import threading
from collections.abc import Callable

COLD, LOAD, MEASURE, EXERCISE, LIVE, LIVE_REFUSE, FLUSH, STOP = "clmevrfs"
REFUSING = frozenset((LOAD, LIVE_REFUSE))
"""What the guest is at when the witness refuses to compile, and to load what is not sealed."""


class State:
    """Reads the byte. Thread-safe; never raises."""

    def __init__(self, path: str | None) -> None:
        """`path` is None where nobody says what the guest is at: then it is cold for ever."""
        self._path = path
        self._last = COLD

    def read(self) -> str:
        """Returns the byte as it is now; the last one that was there, where none is."""
        if self._path is not None:
            try:
                with open(self._path, "rb", buffering=0) as file:
                    byte = file.read(1).decode("ascii")
            except (OSError, ValueError):
                return self._last
            if byte:
                self._last = byte
        return self._last

    def is_told(self) -> bool:
        """Whether there is a byte to be read."""
        if self._path is None:
            return False
        try:
            with open(self._path, "rb", buffering=0) as file:
                return bool(file.read(1))
        except OSError:
            return False


class Watch:
    """A thread that calls `look` again and again, until that returns False or the process ends."""

    def __init__(self, look: Callable[[], bool], interval: float) -> None:
        """`interval` are the seconds in between."""
        self._look, self._interval = look, interval
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread; again after a fork, where it is gone."""
        self._thread = threading.Thread(target=self._run, name="aotgaudi-witness", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        pause = threading.Event()
        while self._look():
            pause.wait(self._interval)
