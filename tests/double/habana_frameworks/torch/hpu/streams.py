"""D-29: streams and events, of which the device is never behind. Source: ``hpu/streams.py`` and ``hpu/events.py``."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

_IDS = itertools.count()


class Stream:
    """A queue of work that is always done."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        del device, priority
        self.stream_id = next(_IDS)

    def wait_event(self, event: Event) -> None:
        """Does nothing: what was recorded is done."""
        del event

    def wait_stream(self, stream: Stream) -> None:
        """Does nothing: the other has no work left."""
        del stream

    def record_event(self, event: Event | None = None) -> Event:
        """Records an event, a new one by default, and returns it."""
        recorded = event or Event()
        recorded.record(self)
        return recorded

    def query(self) -> bool:
        """Returns whether all work is done."""
        return True

    def synchronize(self) -> None:
        """Waits for no one."""


class Event:
    """A moment of a stream."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._is_timed = enable_timing
        self._at: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Records now."""
        del stream
        self._at = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Does nothing: what was recorded is done."""
        del stream

    def query(self) -> bool:
        """Returns whether what was recorded is done."""
        return True

    def synchronize(self) -> None:
        """Waits for no one."""

    def elapsed_time(self, end_event: Event) -> float:
        """Returns the milliseconds up to `end_event`. Raises RuntimeError where one was not timed, or not recorded."""
        if not (self._is_timed and end_event._is_timed) or self._at is None or end_event._at is None:
            raise RuntimeError("both events must be made with enable_timing, and recorded")
        return (end_event._at - self._at) * 1000


_DEFAULT = Stream()
_current = [_DEFAULT]


def default_stream(device: object = None) -> Stream:
    """Returns the stream that a process begins with."""
    del device
    return _DEFAULT


def current_stream(device: object = None) -> Stream:
    """Returns the stream of the innermost ``with stream(...)``."""
    del device
    return _current[-1]


def set_stream(stream: Stream) -> None:
    """Makes `stream` the current one."""
    _current[-1] = stream


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Makes `stream` the current one for a while; None changes nothing."""
    _current.append(stream or _current[-1])
    try:
        yield
    finally:
        _current.pop()
