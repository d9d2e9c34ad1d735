"""Decides which requests need an API key, and whether they carry one.

Every path needs a key, including paths added later, except `OPEN_PATHS`. Those serve probes and scrapers, and show nothing
that clients sent or got.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from aotgaudi.errors import RequestError
from aotgaudi.server.boundary import answer_error

OPEN_PATHS = frozenset({"/health", "/live", "/ready", "/ping", "/metrics", "/version"})
_SCHEME = "bearer"


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
