"""Which ``Host`` a request may name.

A page that a browser has loaded from ``http://evil.example`` may send requests there. If that name is then made to mean
127.0.0.1 (DNS rebinding), they reach a server that listens on this machine only, and the page may read the answers. They
still carry the page's name, though: so a server that listens on the loopback takes only the loopback's names, one that
listens on another address its own, and none other than those that it was told of.
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

    A name that begins with ``*.`` stands for all names below it; ``*`` for any at all. An address, unlike a name, cannot be
    made to mean another server's: with `all_addresses`, any is taken (the probes of Kubernetes use the pod's), else
    only the loopback's.
    """

    names: Collection[str] = frozenset({_ANY})
    all_addresses: bool = True

    @classmethod
    def of(cls, host: str, extra: Collection[str] = ()) -> AllowedHosts:
        """Returns what a server on `host`, a name or an address, takes. `extra` are names that it has besides.

        On all interfaces it takes any, unless `extra` says which.
        """
        address = _address(host)
        if (address is None and not host) or (address is not None and address.is_unspecified):
            return cls(frozenset(map(_normal, extra)) or frozenset({_ANY}))
        is_loopback = _normal(host) == "localhost" or (address is not None and address.is_loopback)
        own = {"localhost"} if is_loopback else set()
        return cls(frozenset({_normal(host), *own, *map(_normal, extra)}), not is_loopback)

    def has(self, header: str) -> bool:
        """Returns whether a request with this ``Host`` is ours."""
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


def _normal(name: str) -> str:
    return name.strip("[]").rstrip(".").lower()


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None


class HostCheck:
    """Refuses requests for other servers with 421, and what else comes on that connection.

    HTTP/1.0 does without ``Host``, and no browser speaks it.
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
