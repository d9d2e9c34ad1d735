"""The supervisor's HTTP server, ``/ready /live /metrics /report``, and the metrics that it publishes.

The server uses the standard library, because the container of a wrapped server may have no web framework. Each connection
carries one request, in its own thread. The number of connections and the seconds for each are bounded. If there are too
many, the oldest is closed, so that slow clients keep nobody out. ``/report`` names paths and flags, so it answers only this
machine unless ``--report-public`` is given. ``docs/metrics.md`` lists the metrics.
"""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, Literal, get_args

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from aotgaudi.errors import SpecError
from aotgaudi.machine import is_loopback
from aotgaudi.wrap.run_options import Listen
from aotgaudi.wrap.verdict import Finding, FindingPhase, What

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
CLIENT_SECONDS = 5.0
"""The time that a client has to send its request and to read the answer, together."""
_TICK_SECONDS = 0.1
"""The time that closing may take. A refusal after the port was bound takes this long."""
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})

_PHASES: tuple[FindingPhase, ...] = ("load", "exercise", "live")


@dataclass(frozen=True, slots=True)
class MetricKind:
    """One metric: its type, what it means, and its labels."""

    type: Literal["counter", "gauge"]
    help: str
    labels: tuple[str, ...] = ()


METRICS: Mapping[str, MetricKind] = MappingProxyType(
    {
        "aotgaudi_guest_warm": MetricKind("gauge", "1 while the server has run sealed code only."),
        "aotgaudi_guest_ready": MetricKind("gauge", "1 while GET /ready answers 200."),
        "aotgaudi_compilations_total": MetricKind(
            "counter", "What a warm server does not do, by the phase and what it was.", ("phase", "what")
        ),
        "aotgaudi_guest_artifacts": MetricKind("gauge", "Artifacts that the server loads.", ("state",)),
        "aotgaudi_cache_files_added_total": MetricKind(
            "counter", "Files that appeared in the server's caches."
        ),
        "aotgaudi_verify_seconds": MetricKind(
            "gauge", "From the process's start until bundle and launch were compared."
        ),
        "aotgaudi_restore_seconds": MetricKind(
            "gauge", "Restoring the sealed files, hashing them on the way."
        ),
        "aotgaudi_guest_ready_seconds": MetricKind("gauge", "From the server's start until it was ready."),
        "aotgaudi_witness_processes": MetricKind(
            "gauge", "The server's processes, by whether an agent is in them.", ("state",)
        ),
        "aotgaudi_capture_info": MetricKind(
            "gauge", "1; the labels say what is served.", ("launch", "bundle")
        ),
        "aotgaudi_guest_residuals": MetricKind(
            "gauge", "What no cache can hold, and every start of this server does again."
        ),
    }
)
"""Every metric, in the order in which they are published."""


class Metrics(Collector):
    """The values of `METRICS`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, dict[tuple[str, ...], float]] = {
            name: {} if kind.labels else {(): 0.0} for name, kind in METRICS.items()
        }
        self._findings: Counter[tuple[str, str]] = Counter()
        for phase in _PHASES:
            for what in get_args(What):
                self._findings[phase, what] = 0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Sets a gauge of `METRICS`, for values of its labels."""
        with self._lock:
            self._values[name][labels] = float(value)

    def count(self, findings: Iterable[Finding]) -> None:
        """Counts findings, except those of a cold start."""
        with self._lock:
            self._findings.update((f.phase, f.what) for f in findings if f.phase in _PHASES)

    def count_files(self, number: int) -> None:
        """Counts files that appeared in the caches."""
        with self._lock:
            self._values["aotgaudi_cache_files_added_total"][()] += number

    def compilations(self) -> Mapping[str, int]:
        """Returns the counts as ``PHASE.WHAT`` -> number, without zeros."""
        with self._lock:
            return {f"{phase}.{what}": number for (phase, what), number in self._findings.items() if number}

    def text(self) -> bytes:
        """Returns all metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yields every metric; `prometheus_client` calls it."""
        with self._lock:
            values = {name: dict(rows) for name, rows in self._values.items()}
            values["aotgaudi_compilations_total"] = {key: float(n) for key, n in self._findings.items()}
        for name, kind in METRICS.items():
            family: CounterMetricFamily | GaugeMetricFamily
            if kind.type == "counter":
                family = CounterMetricFamily(name, kind.help, labels=kind.labels)
            else:
                family = GaugeMetricFamily(name, kind.help, labels=kind.labels)
            for labels, value in values[name].items():
                family.add_metric(labels, value)
            yield family


@dataclass(frozen=True)
class Answers:
    """The callbacks through which the HTTP server asks the supervisor. Each may be called from any thread.

    Attributes:
        not_ready: Returns why the wrapped server must get no requests; empty if it may.
        not_live: Returns why the supervisor itself hangs; empty if it does not.
        report: Returns everything that is known, as JSON.
        metrics: The metrics to publish.
        notes: What ``/ready`` says besides: a name (``not_exercised``, ``not_closed``) -> lines.
    """

    not_ready: Callable[[], str]
    not_live: Callable[[], str]
    report: Callable[[], Mapping[str, Any]]
    metrics: Metrics
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)


class HttpServer:
    """Listens on a port and answers in threads. A context manager."""

    def __init__(self, listen: Listen, answers: Answers) -> None:
        """Binds the port and begins to answer. Raises SpecError if the address cannot be bound."""
        try:
            self._server = _Server(listen, answers)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SpecError(
                f"--listen {listen}", f"cannot be listened on: {reason}", "another port"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_TICK_SECONDS,), name="aotgaudi-http", daemon=True
        )
        self._thread.start()

    def answer_by(self, answers: Answers) -> None:
        """Answers by these callbacks from now on."""
        self._server.answers = answers

    @property
    def port(self) -> int:
        """The bound port."""
        return int(self._server.server_address[1])

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(self, *raised: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, listen: Listen, answers: Answers) -> None:
        self.address_family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        self.listen, self.answers = listen, answers
        self._open: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        super().__init__((listen.host, listen.port), _Handler)

    def server_bind(self) -> None:
        """Binds the port. The base class would also ask a name server for our name, which may take seconds."""
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.listen.host, self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Takes a connection, and closes the oldest one if there are too many."""
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = min(self._open, key=lambda one: self._open[one])
                del self._open[oldest]
                _break(oldest)
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection that is done, and forgets it."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Closes connections that have run out of time."""
        limit = time.monotonic() - CLIENT_SECONDS
        with self._lock:
            for request, begun in self._open.items():
                if begun < limit:
                    _break(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs an error of ours. An OSError is the client's, which went away or was too slow."""
        if not isinstance(sys.exc_info()[1], OSError):
            _log.exception("a request from %s failed", client_address[0])


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "aotgaudi", ""
    timeout = CLIENT_SECONDS

    def do_GET(self) -> None:
        """Answers a GET request."""
        answers = self.server.answers
        routes: Mapping[str, Callable[[], None]] = {
            "/ready": lambda: self._state("ready", answers.not_ready(), answers.notes),
            "/live": lambda: self._state("live", answers.not_live()),
            "/metrics": lambda: self._send(200, CONTENT_TYPE_LATEST, answers.metrics.text()),
            "/report": self._report,
        }
        answer = routes.get(self.path.partition("?")[0])
        if answer is None:
            self._send(404, "text/plain", f"there are {' '.join(routes)}\n".encode())
        else:
            answer()

    def do_HEAD(self) -> None:
        """Answers like GET, without the body."""
        self.do_GET()

    def _state(
        self, word: str, reason: str, notes: Mapping[str, Sequence[str]] = MappingProxyType({})
    ) -> None:
        """Answers with lines of text, or with JSON if the client accepts that."""
        status = 503 if reason else 200
        if "application/json" in self.headers.get("Accept", ""):
            told = {
                word: not reason,
                "reason": reason,
                **{name: list(lines) for name, lines in notes.items()},
            }
            self._send(status, "application/json", json.dumps(told).encode() + b"\n")
            return
        said = (f"{name.replace('_', ' ')}: {line}" for name, lines in notes.items() for line in lines)
        text = "\n".join([f"not {word}: {reason}" if reason else word, *said])
        self._send(status, "text/plain; charset=utf-8", f"{text}\n".encode())

    def _report(self) -> None:
        if not (self.server.listen.report_public or self._is_local()):
            self._send(403, "text/plain", b"the report is for this machine alone (--report-public)\n")
            return
        document = json.dumps(self.server.answers.report(), indent=1, sort_keys=True).encode()
        self._send(200, "application/json", document + b"\n")

    def _is_local(self) -> bool:
        """Whether the client is on this machine and uses a local name, unlike a web page in a local browser."""
        host = self.headers.get("Host", "localhost")
        name = host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
        return is_loopback(self.client_address[0]) and name in _LOCAL_NAMES

    def _send(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *values: object) -> None:
        """Logs nothing, because probes come every second."""


def _break(request: socket.socket) -> None:
    with suppress(OSError):  # It has gone already.
        request.shutdown(socket.SHUT_RDWR)
