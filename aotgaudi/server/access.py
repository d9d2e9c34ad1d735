"""Decides which requests the server takes: by the ``Host`` that they name, and by their API key.

The names protect a server on the loopback against DNS rebinding. A browser lets a page of ``http://evil.example`` send
requests to that name. If the name's owner then points it at 127.0.0.1, the requests reach a server that listens on this
machine only, and the page may read the answers. But they still name evil.example. Starlette's TrustedHostMiddleware knows no
IPv6 addresses.

Every path needs a key, including paths added later, except `OPEN_PATHS`. Those serve probes and scrapers, and show nothing
that clients sent or got.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from aotgaudi.errors import RequestError
from aotgaudi.machine import address_of, is_loopback
from aotgaudi.server.boundary import answer_error
from aotgaudi.server.http import error_body

OPEN_PATHS = frozenset({"/health", "/live", "/ready", "/ping", "/metrics", "/version"})
_SCHEME = "bearer"
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(:[0-9]*)?")
_MAX_ECHO_CHARS = 64
_MISDIRECTED = 421


@dataclass(frozen=True)
class AllowedHosts:
    """Which names and addresses requests may use for a server on `host`, a name or an address (empty: a socket file).

    On the loopback these are the loopback's and `extra`; elsewhere all addresses and `extra`, or every name without `extra`.
    In `extra`, ``*.example.com`` stands for all names below example.com, ``*`` for every name. DNS redirects no addresses,
    and probes of Kubernetes use the pod's.
    """

    host: str = ""
    extra: Collection[str] = ()

    def has(self, header: str) -> bool:
        """Returns whether a request may carry this ``Host``."""
        is_local = is_loopback(self.host)
        if "*" in self.extra or not (is_local or self.extra):
            return True
        found = _HOST.fullmatch(header.strip())
        if found is None:
            return False
        name = _normal(found["name"])
        if is_loopback(name) if is_local else address_of(name) is not None:
            return True
        known = list(map(_normal, self.extra))
        return name in known or any(name.endswith(each[1:]) for each in known if each.startswith("*."))


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


class KeyCheck:
    """Answers 401 to requests without one of the keys. Reads no body, and keeps nothing of a request."""

    def __init__(self, app: ASGIApp, digests: Collection[bytes]) -> None:
        """`digests` are the sha256 of the keys, at least one."""
        self._app, self._digests = app, tuple(digests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        header = Headers(scope=scope).get("authorization")
        if header is None:
            refusal = "This server needs an API key: send the header 'Authorization: Bearer KEY'"
        elif not self._has(header):
            refusal = "Incorrect API key"
        else:
            await self._app(scope, receive, send)
            return
        answer = await answer_error(Request(scope), RequestError(refusal, http_status=401))
        await answer(scope, receive, send)

    def _has(self, header: str) -> bool:
        """Returns whether the header carries one of the keys. How long it takes reveals nothing about them."""
        scheme, _, key = header.partition(" ")
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()
        same = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(same) and scheme.lower() == _SCHEME
