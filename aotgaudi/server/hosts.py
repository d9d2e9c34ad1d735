"""Decides which ``Host`` a request may name, which protects against DNS rebinding.

A browser lets a page of ``http://evil.example`` send requests to that name. If the name's owner then points it at 127.0.0.1,
the requests reach a server that listens on this machine only, and the page may read the answers. But the requests still name
evil.example. So a server on the loopback accepts only the loopback's names, and a server on another address only that
address's names. Both also accept the names that the user adds.

Starlette's TrustedHostMiddleware supports neither IPv6 addresses nor "any address", which probes of Kubernetes need.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from aotgaudi.machine import address_of, is_loopback
from aotgaudi.server.http import error_body

_ANY = "*"
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(:[0-9]*)?")
_MAX_ECHO_CHARS = 64
_MISDIRECTED = 421


@dataclass(frozen=True)
class AllowedHosts:
    """The names and addresses that requests may use. `names` are in lower case.

    ``*.example.com`` stands for all names below example.com, ``*`` for every name. With `all_addresses`, every address is
    allowed, otherwise only the loopback's. That is safe because DNS redirects names, not addresses, and useful because
    probes of Kubernetes use the pod's address.
    """

    names: Collection[str] = frozenset({_ANY})
    all_addresses: bool = True

    @classmethod
    def of(cls, host: str, extra: Collection[str] = ()) -> AllowedHosts:
        """Returns the names that a server on `host` (a name or an address) allows: its own and `extra`.

        A server on all interfaces allows every name unless `extra` is given.
        """
        address = address_of(host)
        if (address is None and not host) or (address is not None and address.is_unspecified):
            return cls(frozenset(map(_normal, extra)) or frozenset({_ANY}))
        own = {"localhost"} if is_loopback(host) else set()
        return cls(frozenset({_normal(host), *own, *map(_normal, extra)}), not is_loopback(host))

    def has(self, header: str) -> bool:
        """Returns whether a request may carry this ``Host``."""
        if _ANY in self.names:
            return True
        found = _HOST.fullmatch(header.strip())
        if found is None:
            return False
        name = _normal(found["name"])
        if name in self.names:
            return True
        if address_of(name) is not None and (self.all_addresses or is_loopback(name)):
            return True
        return any(name.endswith(known[1:]) for known in self.names if known.startswith("*."))


ANY_HOST = AllowedHosts()


def _normal(name: str) -> str:
    return name.strip("[]").rstrip(".").lower()


class HostCheck:
    """Refuses requests for other servers with 421, and closes their connections.

    Requests without ``Host`` pass: only HTTP/1.0 allows them, and no browser speaks that.
    """

    def __init__(self, app: ASGIApp, hosts: AllowedHosts) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if host is not None and not self._hosts.has(host):
            message = f"This server is not {host[:_MAX_ECHO_CHARS]!r} (`serve --allowed-host NAME` says which names it has)"
            answer = JSONResponse(error_body(_MISDIRECTED, message), _MISDIRECTED, {"Connection": "close"})
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)
