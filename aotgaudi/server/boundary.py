"""The layers around the application: request ids, the access log, counts of answers, uncaught errors, and who may enter.

The request id is the client's if it sent one, otherwise a new one. The server repeats it in the answer's header and in every
log line of the request. It is also part of the answer's id, by which the engine knows the request.

Requests are refused by the ``Host`` that they name, and by their API key. The names protect a server on the loopback against
DNS rebinding. A browser lets a page of ``http://evil.example`` send requests to that name. If the name's owner then points
it at 127.0.0.1, the requests reach a server that listens on this machine only, and the page may read the answers. But they
still name evil.example. Starlette's TrustedHostMiddleware knows no IPv6 addresses.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aotgaudi.errors import RequestError
from aotgaudi.machine import address_of, is_loopback
from aotgaudi.server.generation import Generation
from aotgaudi.server.http import body_of, error_body, error_headers, error_status
from aotgaudi.server.log import REQUEST_ID
from aotgaudi.server.metrics import Metrics
from aotgaudi.server.responses import log_unexpected

HEADER = "X-Request-Id"
CLIENT_GONE_STATUS = 499  # nginx's; only metrics and the log show it.
OPEN_PATHS = frozenset({"/health", "/live", "/ready", "/ping", "/metrics", "/version"})
"""The only paths that need no key. They serve probes and scrapers, and show nothing that clients sent or got."""

logger = logging.getLogger(__name__)

_SANE_ID = re.compile(r"[A-Za-z0-9._:=@+/-]{1,128}")
_PROBES = frozenset({"/health", "/ready", "/metrics"})
"""Monitoring polls these, so the access log shows them only when they fail."""
_MAX_LOGGED_CHARS = 256

_SCHEME = "bearer"
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(:[0-9]*)?")
_MAX_ECHO_CHARS = 64
_MISDIRECTED = 421


def request_id_of(header: str | None) -> str:
    """Returns the client's id from `header`, or a new one if there is none that is safe to log.

    A safe id has 1 to 128 ASCII letters, digits and ``._:=@+/-``.
    """
    return header if header is not None and _SANE_ID.fullmatch(header) else uuid.uuid4().hex


def answer_id(prefix: str, request_id: str) -> str:
    """Returns a unique id for an answer. It contains `request_id`, which alone may not be unique: clients choose it."""
    return f"{prefix}-{request_id}-{uuid.uuid4().hex[:8]}"


def _log_access(scope: Scope, route: str, status: int, seconds: float, now: datetime) -> None:
    """Logs a request that ended `now` and took `seconds`. `route` is the path of the route that answered."""
    if route in _PROBES and status == 200:
        return
    method, path = str(scope["method"]), _logged(scope["raw_path"].decode("latin-1"))
    fields: dict[str, Any] = {
        "method": method,
        "path": path,
        "status": status,
        "arrived": (now - timedelta(seconds=seconds)).isoformat(timespec="milliseconds"),
        "duration_seconds": round(seconds, 6),
    }
    text = f"{method} {path} {status} in {seconds:.3f} s"
    state = scope.get("state", {})
    generation: Generation | None = state.get("generation")
    if generation is not None:
        counts = generation.token_counts
        fields["prompt_tokens"] = counts.num_prompt_tokens
        fields["generated_tokens"] = counts.num_output_tokens
        fields["cached_tokens"] = counts.num_cached_tokens
        text += f", {counts.num_prompt_tokens} prompt tokens, {counts.num_output_tokens} generated"
    if "refusal" in state:
        fields["error"] = _logged(state["refusal"])
        text += f": {fields['error']}"
    logger.info("%s", text, extra={"fields": fields})


def _logged(text: str) -> str:
    """Returns a client's text as one line, without control characters and cut to a fixed length."""
    return text[:_MAX_LOGGED_CHARS].encode("unicode_escape").decode("ascii")


class RequestBoundary:
    """Names requests, counts answers by endpoint and status, and answers uncaught errors with 500."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        routes: Iterable[Route],
        access_log_now: Callable[[], datetime] | None = None,
        root_path: str = "",
    ) -> None:
        """Logs requests if `access_log_now`, the clock of the log, is given. Removes the prefix `root_path` from paths."""
        self._app, self._metrics, self._now, self._root_path = app, metrics, access_log_now, root_path
        self._paths: Mapping[object, str] = {route.endpoint: route.path for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began = 0, time.monotonic()
        if self._root_path and scope["path"].startswith(f"{self._root_path}/"):
            scope["path"] = scope["path"][len(self._root_path) :]
        request_id = request_id_of(Headers(scope=scope).get(HEADER))
        token = REQUEST_ID.set(request_id)

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception as error:  # The last place that can answer it.
            if status:
                raise
            await (await answer_error(Request(scope), error))(scope, receive, watch)
        finally:
            # The label is the route's path: clients must not be able to invent labels.
            route, code = self._paths.get(scope.get("endpoint"), "other"), status or CLIENT_GONE_STATUS
            self._metrics.requests.labels(route, str(code)).inc()
            if self._now is not None:
                _log_access(scope, route, code, time.monotonic() - began, self._now())
            REQUEST_ID.reset(token)


async def answer_error(request: Request, error: Exception) -> Response:
    """Returns the answer for an exception that a handler raised."""
    log_unexpected(error)
    if isinstance(error, RequestError):
        request.state.refusal = str(error)
    return JSONResponse(body_of(error), error_status(error), error_headers(error))


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
