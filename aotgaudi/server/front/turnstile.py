"""How many requests of new connections begin in one turn of the event loop; the others wait for the next turns.

When thousands of clients send at once, the event loop has all of it in its hands at once as well, and would do nothing else
until it has looked at the last. Whoever has had an answer before passes, and so do probes: they are few, or cost little.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

_BATCH = 16
"""Some 0.5 ms each, until the intake has it."""


class Turnstile:
    """On the event loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._held: deque[Callable[[], None]] = deque()
        self._num_begun = 0

    def admits(self) -> bool:
        """Returns whether one more may begin in this turn; if so, it counts as begun."""
        if self._held or self._num_begun >= _BATCH:
            return False
        if not self._num_begun:
            self._loop.call_soon(self._turn)
        self._num_begun += 1
        return True

    def hold(self, begin: Callable[[], None]) -> None:
        """Calls `begin` in one of the next turns: first come, first served."""
        self._held.append(begin)

    def _turn(self) -> None:
        self._num_begun = 0
        while self._held and self._num_begun < _BATCH:
            self._num_begun += 1
            self._held.popleft()()
        if self._num_begun:
            self._loop.call_soon(self._turn)
