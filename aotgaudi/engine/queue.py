"""The queue of requests that wait: who is next. Leaving it takes O(1), wherever one stands.

First come, first served, with two exceptions.

* While a request of a crowd runs, or if one was the last to be admitted (it may have run for one step), those that came
  alone go first. A crowd is what comes together over one connection. So who asks for 64 completions at once does not make
  everybody else wait for all of them; and since one of a crowd always runs on, and else takes turns with the others, crowds
  are served as well.
* Of those that came alone, who has a connection that has had an answer before takes turns with those whose connections are
  new. So thousands of new connections do not make everybody else wait for all of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import merge
from itertools import count

from aotgaudi.engine.request import Request


class WaitingQueue:
    """Three lines: of requests that came alone over known and over new connections, and of those in crowds.

    Each is in the order of arrival. One thread only.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[Request, None] = OrderedDict()
        self._new: OrderedDict[Request, None] = OrderedDict()
        self._crowds: OrderedDict[Request, None] = OrderedDict()
        self._last: OrderedDict[Request, None] = self._known
        """Where the last one came from that was taken."""
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._known) + len(self._new) + len(self._crowds)

    def __iter__(self) -> Iterator[Request]:
        """Yields all requests in the order of arrival."""
        return merge(self._known, self._new, self._crowds, key=lambda request: request.number)

    @property
    def oldest(self) -> Request | None:
        """Who arrived first; None when nobody waits."""
        return _oldest(_first(self._known), _first(self._new), _first(self._crowds))

    @property
    def first_alone(self) -> Request | None:
        """Who is next of those that came alone."""
        known, new = _first(self._known), _first(self._new)
        return known if known and self._last is self._new else _oldest(known, new)

    def next(self, *, runs_crowd: bool) -> Request | None:
        """Returns who is next; None when nobody waits. `runs_crowd`: a request of a crowd runs."""
        alone = self.first_alone
        if alone is None or runs_crowd or self._last is self._crowds:
            return alone or self.oldest
        crowd = _first(self._crowds)
        return alone if crowd is None or alone.number < crowd.number else crowd

    def add(self, request: Request) -> None:
        """Lets a request join that has just arrived."""
        request.number = next(self._numbers)
        self._line(request)[request] = None

    def put_back(self, request: Request) -> None:
        """Lets a preempted request wait before all others of its line, which arrived later."""
        line = self._line(request)
        line[request] = None
        line.move_to_end(request, last=False)

    def take(self, request: Request) -> None:
        """Lets a request go that is admitted. Raises KeyError unless it waits here."""
        self.remove(request)
        self._last = self._line(request)

    def remove(self, request: Request) -> None:
        """Lets a request go. Raises KeyError unless it waits here."""
        del self._line(request)[request]

    def _line(self, request: Request) -> OrderedDict[Request, None]:
        if request.is_in_crowd:
            return self._crowds
        return self._new if request.is_new else self._known


def _first(line: OrderedDict[Request, None]) -> Request | None:
    return next(iter(line), None)


def _oldest(*requests: Request | None) -> Request | None:
    waiting = [request for request in requests if request is not None]
    return min(waiting, key=lambda request: request.number) if waiting else None
