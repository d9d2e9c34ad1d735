"""The outermost layer of the application: request ids, the access log, counts of answers, and uncaught errors.

The request id is the client's if it sent one, otherwise a new one. The server repeats it in the answer's header and in every
log line of the request. It is also part of the answer's id, by which the engine knows the request.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aotgaudi.errors import RequestError
from aotgaudi.server.generation import Generation
from aotgaudi.server.http import body_of, error_headers, error_status
from aotgaudi.server.log import REQUEST_ID
from aotgaudi.server.metrics import Metrics
from aotgaudi.server.responses import log_unexpected

HEADER = "X-Request-Id"
CLIENT_GONE_STATUS = 499  # nginx's; only metrics and the log show it.

logger = logging.getLogger(__name__)

_SANE_ID = re.compile(r"[A-Za-z0-9._:=@+/-]{1,128}")
_PROBES = frozenset({"/health", "/ready", "/metrics"})
"""Monitoring polls these, so the access log shows them only when they fail."""
_MAX_LOGGED_CHARS = 256


def request_id_of(header: str | None) -> str:
    """Returns the client's id from `header`, or a new one if there is none that is safe to log.

    A safe id has 1 to 128 ASCII letters, digits and ``._:=@+/-``.
    """
    return header if header is not None and _SANE_ID.fullmatch(header) else uuid.uuid4().hex


def answer_id(prefix: str, request_id: str) -> str:
    """Returns a unique id for an answer. It contains `request_id`, which alone may not be unique: clients choose it."""
    return f"{prefix}-{request_id}-{uuid.uuid4().hex[:8]}"


class AccessLog:
    """Logs a line for each request once it has ended."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        """`now` returns the time of day."""
        self._now = now

    def write(self, scope: Scope, route: str, status: int, seconds: float) -> None:
        """Logs a request that took `seconds`. `route` is the path of the route that answered."""
        if route in _PROBES and status == 200:
            return
        method, path = str(scope["method"]), _logged(scope["raw_path"].decode("latin-1"))
        fields: dict[str, Any] = {
            "method": method,
            "path": path,
            "status": status,
            "arrived": (self._now() - timedelta(seconds=seconds)).isoformat(timespec="milliseconds"),
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
        access: AccessLog | None = None,
        root_path: str = "",
    ) -> None:
        """Without `access`, requests are not logged. If a path begins with `root_path`, that prefix is removed."""
        self._app, self._metrics, self._access, self._root_path = app, metrics, access, root_path
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
            if self._access is not None:
                self._access.write(scope, route, code, time.monotonic() - began)
            REQUEST_ID.reset(token)


async def answer_error(request: Request, error: Exception) -> Response:
    """Returns the answer for an exception that a handler raised."""
    log_unexpected(error)
    if isinstance(error, RequestError):
        request.state.refusal = str(error)
    return JSONResponse(body_of(error), error_status(error), error_headers(error))
