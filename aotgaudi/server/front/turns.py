"""An event loop that takes only so much from the kernel in one turn.

asyncio takes all that has come: when thousands of clients send, or close, in one moment, whoever comes a moment later waits
until the last of them has been looked at. The kernel hands out what is ready in turns (epoll(7): "round robin"), so with
few at a time nobody is left out.
"""

from __future__ import annotations

import asyncio
import math
import select
import selectors

_MAX_EVENTS = 128
"""Of which most are a few us of work each; a connection that closes is 0.1 ms."""


class _FewAtOnce(selectors.EpollSelector):
    """As its base, `_MAX_EVENTS` at a time."""

    _selector: select.epoll

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Part of `selectors.BaseSelector`."""
        seconds = (
            -1.0 if timeout is None else math.ceil(max(timeout, 0.0) * 1e3) * 1e-3
        )  # It counts milliseconds.
        try:
            events = self._selector.poll(seconds, _MAX_EVENTS)
        except InterruptedError:
            return []
        keys = self.get_map()
        return [
            (key, _masks(event) & key.events) for fd, event in events if (key := keys.get(fd)) is not None
        ]


def _masks(event: int) -> int:
    """An error, or the other side's end, is both: whoever reads or writes learns of it."""
    reads = selectors.EVENT_READ if event & ~select.EPOLLOUT else 0
    writes = selectors.EVENT_WRITE if event & ~select.EPOLLIN else 0
    return reads | writes


def event_loop() -> asyncio.AbstractEventLoop:
    """Returns a new one."""
    return asyncio.SelectorEventLoop(_FewAtOnce())
