"""The queue of requests that wait: who is next. Leaving it takes O(1), wherever one stands.

First come, first served, with one exception: while a request of a crowd runs, or if one was the last to be admitted (it may
have run for one step), those that came alone go first. A crowd is what comes together over one connection, or over
connections that are all new (`Room.is_crowd`). So who asks for 64 completions at once does not make everybody else wait for
all of them; and since one of a crowd always runs on, and else takes turns with the others, crowds are served as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import merge
from itertools import count

from aotgaudi.engine.request import Request


class WaitingQueue:
    """Two lines, of requests that came alone and of those in crowds, each in the order of arrival. One thread only."""

    def __init__(self) -> None:
        self._alone: OrderedDict[Request, None] = OrderedDict()
        self._crowds: OrderedDict[Request, None] = OrderedDict()
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._alone) + len(self._crowds)

    def __iter__(self) -> Iterator[Request]:
        """Yields all requests in the order of arrival."""
        return merge(self._alone, self._crowds, key=lambda request: request.number)

    @property
    def oldest(self) -> Request | None:
        """Who arrived first; None when nobody waits."""
        alone, crowd = self.first_alone, next(iter(self._crowds), None)
        if alone is None or crowd is None:
            return alone or crowd
        return min(alone, crowd, key=lambda request: request.number)

    @property
    def first_alone(self) -> Request | None:
        """Who arrived first of those that came alone."""
        return next(iter(self._alone), None)

    def add(self, request: Request) -> None:
        """Lets a request join that has just arrived."""
        request.number = next(self._numbers)
        self._line(request)[request] = None

    def put_back(self, request: Request) -> None:
        """Lets a preempted request wait before all others of its line, which arrived later."""
        line = self._line(request)
        line[request] = None
        line.move_to_end(request, last=False)

    def remove(self, request: Request) -> None:
        """Lets a request go. Raises KeyError unless it waits here."""
        del self._line(request)[request]

    def _line(self, request: Request) -> OrderedDict[Request, None]:
        return self._crowds if request.is_in_crowd else self._alone
