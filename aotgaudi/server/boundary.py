"""The outermost layer of the application: what every request gets, whatever becomes of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aotgaudi.server.generation import Generation
from aotgaudi.server.http import body_of, error_headers, error_status
from aotgaudi.server.metrics import Metrics
from aotgaudi.server.request_id import HEADER, REQUEST_ID, request_id_of
from aotgaudi.server.stream import log_unexpected

CLIENT_GONE_STATUS = 499  # nginx's; nobody reads it but metrics and log

logger = logging.getLogger(__name__)

_PROBES = frozenset({"/health", "/ready", "/metrics", "/dashboard/data"})
"""What is asked again and again; a line says nothing of it while it is answered."""


class AccessLog:
    """Writes a line for each request, once it has ended."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        """`now` is the time of day."""
        self._now = now

    def write(self, scope: Scope, path: str, status: int, seconds: float) -> None:
        """Writes the line of a request that took `seconds`. `path` is its route's: clients must not write the log."""
        if path in _PROBES and status == 200:
            return
        method = str(scope["method"])
        fields: dict[str, Any] = {
            "method": method,
            "path": path,
            "status": status,
            "arrived": (self._now() - timedelta(seconds=seconds)).isoformat(timespec="milliseconds"),
            "duration_seconds": round(seconds, 6),
        }
        text = f"{method} {path} {status} in {seconds:.3f} s"
        generation: Generation | None = scope.get("state", {}).get("generation")
        if generation is not None:
            counts = generation.token_counts
            fields["prompt_tokens"] = counts.num_prompt_tokens
            fields["generated_tokens"] = counts.num_output_tokens
            fields["cached_tokens"] = counts.num_cached_tokens
            text += f", {counts.num_prompt_tokens} prompt tokens, {counts.num_output_tokens} generated"
        logger.info("%s", text, extra={"fields": fields})


class RequestBoundary:
    """Names requests, counts answers by endpoint and status, and answers uncaught errors with 500."""

    def __init__(
        self, app: ASGIApp, metrics: Metrics, routes: Iterable[Route], access: AccessLog | None = None
    ) -> None:
        """`access` None: the log has no line for each request."""
        self._app, self._metrics, self._access = app, metrics, access
        self._paths: Mapping[object, str] = {route.endpoint: route.path for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began = 0, time.monotonic()
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
        except Exception as error:  # The edge of a request.
            if status:
                raise
            await (await answer_error(Request(scope), error))(scope, receive, watch)
        finally:
            # The path of the route that answered, not of the request: clients must not make labels up.
            path, code = self._paths.get(scope.get("endpoint"), "other"), status or CLIENT_GONE_STATUS
            self._metrics.requests.labels(path, str(code)).inc()
            if self._access is not None:
                self._access.write(scope, path, code, time.monotonic() - began)
            REQUEST_ID.reset(token)


async def answer_error(_: Request, error: Exception) -> Response:
    """Answers what was raised."""
    log_unexpected(error)
    return JSONResponse(body_of(error), error_status(error), error_headers(error))
