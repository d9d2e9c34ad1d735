"""Connections that have been accepted and wait to be served: who is next.

As they have come, as long as they are few. In a crowd, first those that only ask for something (GET): probes cost little,
and come over new connections, as crowds do. Then mostly the latest: who comes while a crowd of thousands is being let in
does not wait for all of it. Source: Maurer, "Fail at Scale", ACM Queue 13(8), 2015 (adaptive LIFO).
"""

from __future__ import annotations

import socket
from collections import OrderedDict, deque

_CROWD = 16
"""So many are served in the order of their coming."""
_OLDEST_OF = 4
"""In a crowd, one in so many is the one that has waited the longest."""
_MAX_LOOKED_AT = 64
"""Of how many `look` reads the beginning: 1.5 us each."""
PROBES = (b"GET ", b"HEAD")
"""How requests begin that only ask for something."""


class Arrivals:
    """Sockets, each with its peer's address. On the event loop only."""

    def __init__(self) -> None:
        self._peers: OrderedDict[socket.socket, str] = OrderedDict()
        self._unread: deque[socket.socket] = deque()
        """Those that have said nothing yet, as far as we have looked; some are not here any more."""
        self._probes: deque[socket.socket] = deque()
        self._num_taken = 0

    def __len__(self) -> int:
        return len(self._peers)

    def add(self, client: socket.socket, peer: str) -> None:
        """Has `client`, which does not block, wait."""
        self._peers[client] = peer
        self._unread.append(client)

    def look(self) -> None:
        """Finds probes in a crowd, the latest first. Once a turn of the event loop is enough."""
        if len(self._peers) <= _CROWD:
            return
        silent = []
        for _ in range(min(_MAX_LOOKED_AT, len(self._unread))):
            client = self._unread.pop()
            if client not in self._peers:
                continue
            beginning = _beginning(client)
            if beginning in PROBES:
                self._probes.append(client)
            elif beginning is None:
                silent.append(client)
        self._unread.extendleft(silent)  # The others' turn is next.

    def pop(self) -> tuple[socket.socket, str]:
        """Returns who is next, and its peer. Raises KeyError where nobody waits."""
        while self._probes:
            client = self._probes.popleft()
            if client in self._peers:
                return client, self._peers.pop(client)
        is_crowd = len(self._peers) > _CROWD
        if not is_crowd:
            self._unread.clear()
        self._num_taken += 1
        return self._peers.popitem(last=is_crowd and bool(self._num_taken % _OLDEST_OF))


def _beginning(client: socket.socket) -> bytes | None:
    """Returns the first bytes that `client` has sent, which stay there to be read; None: nothing yet."""
    try:
        return client.recv(len(PROBES[0]), socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError:
        return b""
