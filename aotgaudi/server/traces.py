"""Traces: a span for each request for an answer, sent to an OpenTelemetry collector (OTLP over HTTP).

Names follow OpenTelemetry's conventions for generative AI and for HTTP. For latencies, which have no names there, we use
vLLM's. A span has no text of prompts or answers. A request with ``traceparent`` continues its client's trace and is sampled
as the client says. The SDK reads its ``OTEL_*`` variables (headers, sampler, resource).

A thread sends ended spans every few seconds. Up to 2,048 spans wait; beyond that, the oldest are dropped. Only this module
imports modules of the SDK, and it does so before the guard is armed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import Scope

from aotgaudi.server.generation import Generation
from aotgaudi.server.preprocess.prepare import PreparedRequest

_EXPORT_SECONDS = 3.0
"""How long one batch may take, retries included. When the server ends, one batch may be in flight and two may wait."""
_MAX_WAITING, _MAX_SENT = 2048, 1024
_OPERATIONS: Mapping[str, str] = MappingProxyType(
    {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}
)
_PATH = "/v1/traces"
_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed", "frequency_penalty", "presence_penalty")
"""Sampling parameters that have names in the conventions, under `gen_ai.request`."""


def endpoint_of(url: str) -> str:
    """Returns the URL to send spans to. If `url` has no path, OTLP's is added."""
    return url.rstrip("/") + _PATH if urlsplit(url).path in ("", "/") else url


class Traces:
    """Writes spans. Use it on the event loop, which it never blocks; only `close` blocks."""

    def __init__(
        self, url: str, version: str, make_exporter: Callable[..., SpanExporter] = OTLPSpanExporter
    ) -> None:
        """`url` is the collector's, `version` this program's."""
        exporter = make_exporter(endpoint=endpoint_of(url), timeout=_EXPORT_SECONDS)
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "aotgaudi", "service.version": version}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=_MAX_WAITING, max_export_batch_size=_MAX_SENT)
        )
        self._tracer = self._provider.get_tracer("aotgaudi.server", version)
        self._propagator = TraceContextTextMapPropagator()

    def write(self, scope: Scope, route: str, status: int, began: int, ended: int) -> None:
        """Writes the span of a request that has ended. Times are nanoseconds since 1970."""
        operation = _OPERATIONS.get(route)
        if operation is None:
            return
        state = scope.get("state", {})
        prepared: PreparedRequest | None = state.get("prepared")
        span = self._tracer.start_span(
            operation if prepared is None else f"{operation} {prepared.model}",
            context=self._propagator.extract(dict(Headers(scope=scope))),
            kind=SpanKind.SERVER,
            attributes=dict(_attributes(operation, scope["method"], route, status, state)),
            start_time=began,
        )
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(ended)

    def close(self) -> None:
        """Sends the waiting spans, for at most ten seconds."""
        self._provider.shutdown()


def _attributes(
    operation: str, method: str, route: str, status: int, state: Mapping[str, Any]
) -> Iterable[tuple[str, Any]]:
    yield "gen_ai.operation.name", operation
    yield "gen_ai.provider.name", "aotgaudi"
    yield "http.request.method", method
    yield "http.route", route
    yield "http.response.status_code", status
    if status >= 400:
        yield "error.type", str(status)
    prepared: PreparedRequest | None = state.get("prepared")
    if prepared is not None:
        yield from _asked(prepared)
    generation: Generation | None = state.get("generation")
    if generation is not None:
        yield from _answered(generation)


def _asked(prepared: PreparedRequest) -> Iterable[tuple[str, Any]]:
    yield "gen_ai.request.model", prepared.model
    yield "gen_ai.response.model", prepared.model
    for name in _SAMPLING:
        value = getattr(prepared.params, name)
        if value is not None:
            yield f"gen_ai.request.{name}", value


def _answered(generation: Generation) -> Iterable[tuple[str, Any]]:
    counts = generation.token_counts
    yield "gen_ai.response.id", generation.request_id
    yield "gen_ai.response.finish_reasons", list(generation.finish_reasons)
    yield "gen_ai.usage.input_tokens", counts.num_prompt_tokens
    yield "gen_ai.usage.output_tokens", counts.num_output_tokens
    yield "gen_ai.usage.cache_read.input_tokens", counts.num_cached_tokens
    for name, seconds in (
        ("time_in_queue", generation.queue_seconds),
        ("time_to_first_token", generation.first_token_seconds),
        ("e2e", generation.whole_seconds),
    ):
        if seconds is not None:
            yield f"gen_ai.latency.{name}", seconds
