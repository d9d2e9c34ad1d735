"""A span for each request, as a collector gets it; a collector that fails costs no answer."""

from __future__ import annotations

import http.server
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from click.testing import CliRunner
from starlette.applications import Starlette
from starlette.testclient import TestClient

from aotgaudi.cli.main import cli
from aotgaudi.cli.serve import _parse_url
from aotgaudi.server.app import create_app
from aotgaudi.server.service import Service
from tests.environment import ROOT

pytest.importorskip("opentelemetry.instrumentation.asgi", reason="[otel] is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from aotgaudi.server.launch import tracing

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


@contextmanager
def traced(service: Service, collector: Collector) -> Iterator[TestClient]:
    """Gives a client of an application with traces. Left, all spans are sent."""
    with tracing(f"{collector.url}/v1/traces") as wrap:
        yield TestClient(wrap(create_app(service)), raise_server_exceptions=False)


def test_a_streamed_chat_of_a_client_that_traces_continues_its_trace(service: Service) -> None:
    body = {"messages": [{"role": "user", "content": "very secret"}], "stream": True}

    with collecting() as collector, traced(service, collector) as client:
        client.post("/v1/chat/completions", json=body, headers={"traceparent": PARENT})
        client.post("/v1/chat/completions", json=body, headers={"traceparent": PARENT[:-1] + "0"})

    (span,) = collector.spans()
    assert (span.name, span.kind) == ("POST /v1/chat/completions", Span.SPAN_KIND_SERVER)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == tuple(PARENT.split("-")[1:3])
    assert b"secret" not in span.SerializeToString()


def test_a_failed_request_has_a_span_that_says_so(service: Service, engine, scripts) -> None:
    engine.script = scripts["broken"]

    with collecting() as collector, traced(service, collector) as client:
        assert client.post("/v1/completions", json={"prompt": "hi"}).status_code == 500

    (span,) = collector.spans()
    assert span.status.code == Status.STATUS_CODE_ERROR


def test_probes_and_scrapers_have_no_spans(service: Service) -> None:
    with collecting() as collector, traced(service, collector) as client:
        for path in ("/health", "/ready", "/metrics"):
            client.get(path)

    assert collector.spans() == []


@pytest.mark.parametrize("is_there", [True, False])
def test_a_collector_that_fails_costs_no_answer_and_the_end_is_not_late(
    service: Service, is_there: bool
) -> None:
    with collecting(status=503) as collector:
        if not is_there:
            collector.url = "http://127.0.0.1:9"
        with traced(service, collector) as client:
            for _ in range(20):
                assert client.post("/v1/completions", json={"prompt": "hi"}).status_code == 200
            began = time.monotonic()

    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/otlp/v1/traces", "https://c/otlp/v1/traces"),
    ],
)
def test_a_url_without_a_path_gets_the_one_of_the_protocol(url: str, expected: str) -> None:
    assert _parse_url(url) == expected


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
    monkeypatch.setitem(sys.modules, "opentelemetry.instrumentation.asgi", None)
    monkeypatch.setattr("aotgaudi.bundle.kind.is_capture", lambda _: False)

    done = CliRunner().invoke(
        cli,
        ["serve", "--bundle", str(tmp_path), "--model", str(tmp_path), "--otlp-traces-endpoint", "http://c"],
    )

    assert done.exit_code == 2
    assert "pip install 'aotgaudi[otel]'" in done.stderr


@pytest.mark.process
def test_nothing_of_it_is_imported_unless_it_is_asked_for(service: Service) -> None:
    code = (
        "import sys, aotgaudi.server.launch, aotgaudi.cli.serve; "
        "print([name for name in sys.modules if 'opentelemetry' in name])"
    )

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
    assert isinstance(create_app(service), Starlette)
