"""Which ``Host`` a request may name: protection against DNS rebinding.

A browser lets a page of ``http://evil.example`` send requests to that name. If its owner then points the name at 127.0.0.1,
they reach a server that listens on this machine only, and the page may read the answers. But they still carry the page's
name. So a server on the loopback takes only the loopback's names, a server on another address only its own, and both those
that they were told of.

Starlette's TrustedHostMiddleware knows neither IPv6 addresses nor "any address", which probes of Kubernetes use.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from aotgaudi.server.http import error_body

_ANY = "*"
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(:[0-9]*)?")
_MAX_ECHO_CHARS = 64
_MISDIRECTED = 421


@dataclass(frozen=True)
class AllowedHosts:
    """The names that requests may use: `names`, in lower case, or addresses.

    ``*.example.com`` stands for all names below example.com, ``*`` for every name. Nobody can redirect an address, as DNS
    redirects a name. So with `all_addresses` every address is allowed (probes of Kubernetes use the pod's), otherwise only
    the loopback's.
    """

    names: Collection[str] = frozenset({_ANY})
    all_addresses: bool = True

    @classmethod
    def of(cls, host: str, extra: Collection[str] = ()) -> AllowedHosts:
        """Returns what a server on `host` (a name or an address) allows: its own names, and `extra`.

        A server on all interfaces allows every name unless `extra` is given.
        """
        address = _address(host)
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
        address = _address(name)
        if address is not None and (self.all_addresses or address.is_loopback):
            return True
        return any(name.endswith(known[1:]) for known in self.names if known.startswith("*."))


ANY_HOST = AllowedHosts()


def is_loopback(host: str) -> bool:
    """Returns whether `host`, a name or an address, can be reached from this machine only."""
    address = _address(host)
    return _normal(host) == "localhost" if address is None else address.is_loopback


def _normal(name: str) -> str:
    return name.strip("[]").rstrip(".").lower()


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None


class HostCheck:
    """Refuses requests for other servers with 421, and closes their connections.

    It lets requests without ``Host`` pass: only HTTP/1.0 allows them, which no browser speaks.
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
