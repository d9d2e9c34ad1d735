"""How many clients there may be, and how long one may keep the server waiting; and the open files that they need."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from typing import Literal

from aotgaudi.errors import SpecError

Reason = Literal[
    "refused", "evicted", "no_resources", "head_timeout", "body_timeout", "write_timeout", "idle", "malformed"
]

REASONS: dict[Reason, str] = {
    "refused": "turned away: all connections were answering",
    "evicted": "closed to make room: the client had kept the server waiting the longest",
    "no_resources": "not taken for a moment: the system has no descriptor or no memory left",
    "head_timeout": "closed: the head of a request did not come in time",
    "body_timeout": "closed: the body of a request did not come, or came too slowly",
    "write_timeout": "closed: the client did not read its answer, or read it too slowly",
    "idle": "closed: no further request came",
    "malformed": "closed: not a request that HTTP/1.1 allows",
}
"""Why the server ends a connection, or does not begin one."""

DEFAULT_MAX_CONNECTIONS = 4096
_LEAST_CONNECTIONS = 8
_SPARE_FILES = 32
"""For the log, the builder on first use, ``/proc``, and connections that are being closed while others are taken."""
_DESCRIPTORS = "/proc/self/fd"


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """What clients are held to. The rules are nginx's and mod_reqtimeout's, the defaults nearer to the latter's.

    Attributes:
        max_connections: Connections at once. A further one takes the place of the one whose client has kept the server
            waiting the longest; where no client does, it gets 503.
        client_seconds: The head of a request must be there so long after the connection was opened, or, on one that
            was kept alive, after the head's first byte. While a body is read or an answer written, each period of this
            length must move `least_bytes_per_second`.
        least_bytes_per_second: See `client_seconds`.
        idle_seconds: A connection that was answered waits so long for another request.
        linger_seconds: So long the rest of a body is read and thrown away after its request was refused, so that the
            client gets to read the refusal.
    """

    max_connections: int = DEFAULT_MAX_CONNECTIONS
    client_seconds: float = 20.0
    least_bytes_per_second: int = 4096
    idle_seconds: float = 75.0
    linger_seconds: float = 5.0

    @property
    def least_bytes(self) -> float:
        """How many bytes `client_seconds` must move."""
        return self.client_seconds * self.least_bytes_per_second


DEFAULT_LIMITS = ConnectionLimits()


@dataclass(frozen=True, kw_only=True)
class Listening:
    """Where a server listens, and for whom; what `serve` was told.

    Attributes:
        host: Name or address.
        port: 0 for any free one.
        allowed_hosts: Names that requests may use besides those of `host`.
        max_connections: None for as many as there are files for, up to a limit.
        client_seconds: See `ConnectionLimits`.
    """

    host: str
    port: int
    allowed_hosts: tuple[str, ...] = ()
    max_connections: int | None = None
    client_seconds: float = DEFAULT_LIMITS.client_seconds

    def limits(self) -> ConnectionLimits:
        """Returns what clients are held to. Call it when everything else is open. Raises SpecError."""
        return ConnectionLimits(
            max_connections=allow_connections(self.max_connections), client_seconds=self.client_seconds
        )


def allow_connections(asked: int | None) -> int:
    """Returns how many connections this process may have, and raises its soft limit of open files to have so many.

    Args:
        asked: What the user wants; None: `DEFAULT_MAX_CONNECTIONS`, or fewer where files are scarce.

    Raises:
        SpecError: the hard limit of open files is too low.
    """
    used = len(os.listdir(_DESCRIPTORS)) + _SPARE_FILES
    wanted = asked or DEFAULT_MAX_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _allowed_files(used + wanted, soft, hard)
    if soft not in (limit, resource.RLIM_INFINITY):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    found = min(wanted, limit - used)
    if found < (asked or _LEAST_CONNECTIONS):
        raise SpecError(
            f"{asked or _LEAST_CONNECTIONS} connections",
            f"need {used + (asked or _LEAST_CONNECTIONS)} open files, and this process may open {limit}",
            "raise the hard limit (`ulimit -Hn`, LimitNOFILE=, --ulimit nofile=), or ask for fewer",
        )
    return found


def _allowed_files(wanted: int, soft: int, hard: int) -> int:
    """The soft limit to have: not below the present one, not above the hard one."""
    infinite = resource.RLIM_INFINITY
    if soft == infinite:
        return wanted
    return max(soft, wanted if hard == infinite else min(wanted, hard))
