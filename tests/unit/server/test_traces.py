"""A span for each request for an answer, as a collector gets it; a collector that fails costs no answer."""

from __future__ import annotations

import http.server
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from starlette.applications import Starlette
from starlette.testclient import TestClient

from aotgaudi.cli.main import cli
from aotgaudi.engine.output import TokenEvent, Usage
from aotgaudi.server.app import create_app
from aotgaudi.server.service import Service
from tests.environment import ROOT

pytest.importorskip("opentelemetry.sdk", reason="[otel] is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from aotgaudi.server.traces import Traces, endpoint_of

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Collector:
    """Takes spans over HTTP, as a collector does."""

    url: str
    requests: queue.Queue[ExportTraceServiceRequest] = field(default_factory=queue.Queue)
    paths: list[str] = field(default_factory=list)

    def spans(self) -> list[Span]:
        found = []
        while not self.requests.empty():
            for resource in self.requests.get().resource_spans:
                found += [span for scope in resource.scope_spans for span in scope.spans]
        return found


@contextmanager
def collecting(status: int = 200) -> Iterator[Collector]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.paths.append(self.path)
            collector.requests.put(ExportTraceServiceRequest.FromString(body))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def attributes_of(span: Span) -> dict[str, Any]:
    def value_of(value: Any) -> Any:
        kind = value.WhichOneof("value")
        found = getattr(value, kind)
        return [value_of(one) for one in found.values] if kind == "array_value" else found

    return {pair.key: value_of(pair.value) for pair in span.attributes}


@contextmanager
def traced(service: Service, collector: Collector) -> Iterator[TestClient]:
    """Gives a client of an application with traces. Left, all spans are sent."""
    traces = Traces(collector.url, "9.9.9")
    try:
        yield TestClient(create_app(service, traces=traces), raise_server_exceptions=False)
    finally:
        traces.close()


def used(request_id: str) -> Sequence[TokenEvent]:
    usage = Usage(num_prompt_tokens=2, num_output_tokens=3, num_cached_tokens=1, queue_seconds=0.25)
    return (
        TokenEvent(request_id=request_id, text="Hel", token_ids=(1, 2)),
        TokenEvent(request_id=request_id, text="lo", token_ids=(3,), finish_reason="stop", usage=usage),
    )


def test_a_request_has_one_span_with_the_names_of_the_conventions(service: Service, engine) -> None:
    engine.script = used
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "seed": 3}

    with collecting() as collector, traced(service, collector) as client:
        before = time.time_ns()
        answer = client.post("/v1/completions", json=body).json()
        after = time.time_ns()

    ((span,), path) = collector.spans(), collector.paths[0]
    assert path == "/v1/traces"
    assert (span.name, span.kind) == ("text_completion tiny", Span.SPAN_KIND_SERVER)
    assert before <= span.start_time_unix_nano <= span.end_time_unix_nano <= after
    found = attributes_of(span)
    assert 0 <= found.pop("gen_ai.latency.time_to_first_token") <= found.pop("gen_ai.latency.e2e") < 10
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "aotgaudi",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.seed": 3,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 1,
        "gen_ai.latency.time_in_queue": 0.25,
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
    }


def test_a_streamed_chat_of_a_client_that_traces_continues_its_trace(service: Service) -> None:
    body = {"messages": [{"role": "user", "content": "very secret"}], "stream": True}

    with collecting() as collector, traced(service, collector) as client:
        client.post("/v1/chat/completions", json=body, headers={"traceparent": PARENT})

    (span,) = collector.spans()
    assert span.name == "chat tiny"
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == tuple(PARENT.split("-")[1:3])
    assert attributes_of(span)["gen_ai.usage.output_tokens"] == 3
    assert b"secret" not in span.SerializeToString()


def test_a_client_that_does_not_sample_gets_no_span_and_a_malformed_parent_is_ignored(
    service: Service,
) -> None:
    with collecting() as collector, traced(service, collector) as client:
        for parent in (PARENT[:-1] + "0", "00-zz-1", "", "x" * 10_000):
            client.post("/v1/completions", json={"prompt": "hi"}, headers={"traceparent": parent})

    assert [span.parent_span_id for span in collector.spans()] == [b"", b"", b""]


@pytest.mark.parametrize(
    ("script", "body", "status", "is_error"),
    [
        ("answer", {"prompt": "hi", "max_tokens": 10_000}, 400, False),
        ("answer", {"prompt": "hi", "model": "other"}, 404, False),
        ("broken", {"prompt": "hi"}, 500, True),
        ("shutdown", {"prompt": "hi"}, 503, True),
    ],
)
def test_a_refused_or_failed_request_has_a_span_that_says_so(
    service: Service, engine, scripts, script: str, body: dict[str, object], status: int, is_error: bool
) -> None:
    engine.script = scripts[script]

    with collecting() as collector, traced(service, collector) as client:
        assert client.post("/v1/completions", json=body).status_code == status

    (span,) = collector.spans()
    found = attributes_of(span)
    assert (found["http.response.status_code"], found["error.type"]) == (status, str(status))
    assert (span.status.code == Status.STATUS_CODE_ERROR) is is_error
    assert b"secret" not in span.SerializeToString()


def test_probes_scrapers_and_unknown_paths_have_no_spans(service: Service) -> None:
    with collecting() as collector, traced(service, collector) as client:
        for path in ("/health", "/ready", "/metrics", "/v1/models", "/nowhere"):
            client.get(path)

    assert collector.spans() == []


def test_the_resource_is_this_program_and_the_environment_may_rename_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    with collecting() as collector:
        with traced(service, collector) as client:
            client.post("/v1/completions", json={"prompt": "hi"})
        (resource,) = collector.requests.get().resource_spans
        found = {pair.key: pair.value.string_value for pair in resource.resource.attributes}

    assert (found["service.name"], found["service.version"]) == ("aotgaudi", "9.9.9")
    assert found["deployment.environment"] == "test"


@pytest.mark.parametrize("trouble", ["refuses", "is not there", "is silent"])
def test_a_collector_that_fails_costs_no_answer_and_the_end_is_not_late(
    service: Service, trouble: str
) -> None:
    with collecting(status=503) as collector:
        if trouble == "is not there":
            collector.url = "http://127.0.0.1:9"
        traces = Traces(collector.url, "9.9.9", SilentExporter if trouble == "is silent" else _exporter())
        client = TestClient(create_app(service, traces=traces))
        for _ in range(20):
            assert client.post("/v1/completions", json={"prompt": "hi"}).status_code == 200
        began = time.monotonic()
        traces.close()

    assert time.monotonic() - began < 10


def _exporter() -> Callable[..., Any]:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter


def SilentExporter(endpoint: str, timeout: float) -> Any:
    """An exporter to a place that accepts connections and never answers."""
    import socket

    listener = socket.create_server(("127.0.0.1", 0))
    exporter = _exporter()(
        endpoint=f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces", timeout=timeout
    )
    exporter.listener = listener
    return exporter


def test_what_a_collector_does_not_take_does_not_grow_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    import gc

    from opentelemetry.sdk.trace import ReadableSpan

    monkeypatch.setattr("aotgaudi.server.traces._EXPORT_SECONDS", 0.5)
    traces = Traces("http://127.0.0.1:9", "9.9.9")
    scope = {"type": "http", "method": "POST", "headers": [], "state": {}}
    for index in range(10_000):
        traces.write(scope, "/v1/completions", 200, index, index + 1)

    gc.collect()
    held = sum(isinstance(one, ReadableSpan) for one in gc.get_objects())
    traces.close()

    assert held <= 2048 + 1024


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/otlp/v1/traces", "https://c/otlp/v1/traces"),
    ],
)
def test_a_url_without_a_path_gets_the_one_of_the_protocol(url: str, expected: str) -> None:
    assert endpoint_of(url) == expected


@pytest.mark.parametrize("url", ["collector:4317", "grpc://collector", "http://", ""])
def test_what_is_no_url_is_bad_usage(tmp_path: Path, url: str) -> None:
    done = CliRunner().invoke(
        cli, ["serve", "--bundle", str(tmp_path), "--model", str(tmp_path), "--otlp-traces-endpoint", url]
    )

    assert done.exit_code == 2
    assert "must be a URL such as http://collector:4318" in done.stderr


def test_a_missing_package_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    monkeypatch.setattr("aotgaudi.bundle.kind.is_capture", lambda _: False)

    done = CliRunner().invoke(
        cli,
        ["serve", "--bundle", str(tmp_path), "--model", str(tmp_path), "--otlp-traces-endpoint", "http://c"],
    )

    assert done.exit_code == 2
    assert "pip install 'aotgaudi[otel]'" in done.stderr


def test_nothing_of_it_is_imported_unless_it_is_asked_for(service: Service) -> None:
    code = (
        "import sys, aotgaudi.server.launch, aotgaudi.cli.serve; "
        "print([name for name in sys.modules if 'opentelemetry' in name or name == 'aotgaudi.server.traces'])"
    )

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
    assert isinstance(create_app(service), Starlette)
