"""How many requests of new connections begin in one turn of the event loop; the others wait for the next turns.

When thousands of clients send at once, the event loop has all of it in its hands at once as well, and would do nothing else
until it has looked at the last. Whoever has had an answer before passes, and so do probes: they are few, or cost little.

Who would be refused in the end, because the server is full, is turned back here: to read, check and prepare a request
takes ten times as long.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from aotgaudi.server.front.pace import Pace

_BATCH = 16
"""Some 0.5 ms each, until the intake has it."""
_PATIENCE_SECONDS = 0.25
"""Who has been held for so long is turned back: more come than can begin."""
_TURNED_BACK = 8
"""So many are turned back for one that begins."""


class Entrant(Protocol):
    """Who comes to a turnstile: then one of these is called, once."""

    def begin(self) -> None:
        """It is this one's turn."""
        ...

    def turn_back(self) -> bool:
        """The server is full. Returns whether this one has gone; if not, it has begun."""
        ...


class Turnstile:
    """On the event loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, is_full: Callable[[], bool]) -> None:
        """`is_full` says whether one more would be refused, and counts it if so."""
        self._loop, self._is_full = loop, is_full
        self._pace = Pace(loop.time, 1, _BATCH)
        self._held: deque[tuple[float, Entrant]] = deque()
        """Each with the time at which it came."""
        self._batch, self._num_begun = _BATCH, 0.0

    def come(self, entrant: Entrant) -> bool:
        """Lets `entrant` in, or turns it back, now or in one of the next turns: first come, first served.

        Returns whether that has happened.
        """
        if self._held or self._num_begun >= self._batch:
            self._held.append((self._loop.time(), entrant))
            return False
        if not self._num_begun:
            self._pace.start()
            self._loop.call_soon(self._turn)
        self._let(entrant, is_late=False)
        return True

    def _let(self, entrant: Entrant, *, is_late: bool) -> None:
        if not is_late and not self._is_full():
            self._num_begun += 1
            entrant.begin()
        else:
            self._num_begun += 1 / _TURNED_BACK if entrant.turn_back() else 1

    def _turn(self) -> None:
        self._num_begun = 0.0
        self._batch = self._pace.next()
        latest = self._loop.time() - _PATIENCE_SECONDS
        while self._held and self._num_begun < self._batch:
            came, entrant = self._held.popleft()
            self._let(entrant, is_late=came < latest)
        if self._num_begun:
            self._loop.call_soon(self._turn)
