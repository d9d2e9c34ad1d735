"""How much to begin in one turn of the event loop: all others wait for its end, and a request takes some ten turns."""

from __future__ import annotations

from collections.abc import Callable

_TURN_SECONDS = 0.005
"""A turn that takes longer has the next one begin with less."""


class Pace:
    """So much as keeps turns short: half after a long one, one more after a short one. On the event loop only."""

    def __init__(self, clock: Callable[[], float], least: int, most: int) -> None:
        self._clock, self._least, self._most, self._now = clock, least, most, most
        self._began = 0.0

    def start(self) -> None:
        """The first turn begins, after some in which nothing was to do."""
        self._began = self._clock()

    def next(self) -> int:
        """Returns how much the turn that begins may begin, by how long the one before took."""
        began, self._began = self._began, self._clock()
        is_slow = self._began - began > _TURN_SECONDS
        self._now = max(self._least, self._now // 2) if is_slow else min(self._most, self._now + 1)
        return self._now
