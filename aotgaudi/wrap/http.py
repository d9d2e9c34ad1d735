"""What a supervisor counts, in Prometheus' text format; ``docs/metrics.md`` lists it. Without a client library.

What a supervisor answers, on a port of its own: ``/ready /live /metrics /report``. Standard library only.

A guest's container need not have a web framework. Every connection is one request, in a thread; there are so many at once,
each has so long for everything, and where there is no room the oldest goes: a client that is slow on purpose keeps nobody
out. ``/report`` names paths and flags: it is for this machine alone unless that is asked for.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, Literal, get_args

from aotgaudi.errors import SpecError
from aotgaudi.wrap.run_options import Listen
from aotgaudi.wrap.verdict import Finding, Phase, What

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Kind = Literal["counter", "gauge"]
_PHASES: tuple[Phase, ...] = ("load", "exercise", "live")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its type, what it means, and its labels."""

    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


FAMILIES: Mapping[str, Metric] = MappingProxyType(
    {
        "aotgaudi_guest_warm": Metric(
            "gauge", "1 while nothing speaks against it that the guest runs from sealed code alone."
        ),
        "aotgaudi_guest_ready": Metric("gauge", "1 while GET /ready answers 200."),
        "aotgaudi_compilations_total": Metric(
            "counter", "What a warm guest does not do, by the phase and what it was.", ("phase", "what")
        ),
        "aotgaudi_guest_artifacts": Metric("gauge", "Artifacts that the guest loads.", ("state",)),
        "aotgaudi_cache_files_added_total": Metric("counter", "Files that appeared in the guest's caches."),
        "aotgaudi_verify_seconds": Metric(
            "gauge", "From the process's start until bundle and launch were compared."
        ),
        "aotgaudi_restore_seconds": Metric("gauge", "Restoring the sealed files, hashing them on the way."),
        "aotgaudi_guest_ready_seconds": Metric("gauge", "From the guest's start until it was ready."),
        "aotgaudi_witness_processes": Metric(
            "gauge", "The guest's processes, by whether a witness is in them.", ("state",)
        ),
        "aotgaudi_capture_info": Metric(
            "gauge", "1; the labels say what is served.", ("launch", "bundle", "epoch")
        ),
        "aotgaudi_guest_residuals": Metric(
            "gauge", "What no cache can hold, and every start of this guest does again."
        ),
    }
)
"""Every metric, in the order in which they are exposed."""


class Metrics:
    """The values. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        self._findings: Counter[tuple[str, str]] = Counter()
        for name, family in FAMILIES.items():
            if not family.labels:
                self._values[name, ()] = 0.0
        for phase in _PHASES:
            for what in get_args(What):
                self._findings[phase, what] = 0

    def set(self, name: str, value: float, *labels: str) -> None:
        """Sets a gauge. Raises KeyError for a metric that is not listed, ValueError for labels that are not its."""
        if len(labels) != len(FAMILIES[name].labels):
            raise ValueError(f"{name} has the labels {FAMILIES[name].labels}")
        with self._lock:
            self._values[name, labels] = float(value)

    def get(self, name: str, *labels: str) -> float:
        """Returns a value; 0 for what was never set."""
        with self._lock:
            return self._values.get((name, labels), 0.0)

    def count(self, findings: Iterable[Finding]) -> None:
        """Counts findings, but for those of a cold phase."""
        with self._lock:
            self._findings.update((f.phase, f.what) for f in findings if f.phase in _PHASES)

    def count_files(self, number: int) -> None:
        """Counts files that appeared in the caches."""
        with self._lock:
            self._values["aotgaudi_cache_files_added_total", ()] += number

    def compilations(self) -> Mapping[str, int]:
        """Returns what was counted, ``PHASE.WHAT`` -> number, without zeros."""
        with self._lock:
            return {f"{phase}.{what}": number for (phase, what), number in self._findings.items() if number}

    def expose(self) -> bytes:
        """Returns all of it as text."""
        with self._lock:
            return "".join(self._lines()).encode()

    def _lines(self) -> Iterator[str]:
        for name, family in FAMILIES.items():
            yield f"# HELP {name} {family.help}\n# TYPE {name} {family.kind}\n"
            if name == "aotgaudi_compilations_total":
                for labels, number in self._findings.items():
                    yield _line(name, family.labels, labels, number)
            for (other, values), value in self._values.items():
                if other == name:
                    yield _line(name, family.labels, values, value)


def _line(name: str, labels: tuple[str, ...], values: tuple[str, ...], value: float) -> str:
    pairs = ",".join(f'{label}="{_escaped(text)}"' for label, text in zip(labels, values, strict=True))
    return f"{name}{{{pairs}}} {value:g}\n" if pairs else f"{name} {value:g}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


MAX_CONNECTIONS = 32
CLIENT_SECONDS = 5.0
"""How long a client has for its request and for reading the answer, together."""
_TICK_SECONDS = 0.1
"""How long closing may take: what is refused once we answer waits for it."""
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True)
class Answers:
    """What is asked of the supervisor; each may be called from any thread.

    Attributes:
        not_ready: Why the guest is not to get requests; empty where it is.
        not_live: Why the supervisor itself hangs; empty where it does not.
        report: Everything that is known, as JSON.
        metrics: What is counted.
    """

    not_ready: Callable[[], str]
    not_live: Callable[[], str]
    report: Callable[[], Mapping[str, Any]]
    metrics: Metrics


class HttpServer:
    """The listening port, answering in threads of its own. A context manager."""

    def __init__(self, listen: Listen, answers: Answers) -> None:
        """Binds and answers. Raises SpecError where the address cannot be had."""
        try:
            self._server = _Server(listen, answers)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SpecError(
                f"--listen {listen}", f"cannot be listened on: {reason}", "another port"
            ) from error
        self._thread = threading.Thread(target=self._serve, name="aotgaudi-front", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that was bound."""
        return int(self._server.server_address[1])

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _serve(self) -> None:
        self._server.serve_forever(_TICK_SECONDS)


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
        """Binds, without asking a name server what we are called, which may take seconds."""
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.listen.host, self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Takes a connection, and lets the oldest go where there are too many."""
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = min(self._open, key=lambda one: self._open[one])
                del self._open[oldest]
                _break(oldest)
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forgets a connection that is done."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Breaks connections whose time is over."""
        limit = time.monotonic() - CLIENT_SECONDS
        with self._lock:
            for request, begun in self._open.items():
                if begun < limit:
                    _break(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a client that went away."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "aotgaudi", ""
    timeout = CLIENT_SECONDS

    def do_GET(self) -> None:
        """Answers."""
        routes: Mapping[str, Callable[[], None]] = {
            "/ready": lambda: self._state("ready", self.server.answers.not_ready()),
            "/live": lambda: self._state("live", self.server.answers.not_live()),
            "/metrics": lambda: self._send(200, CONTENT_TYPE, self.server.answers.metrics.expose()),
            "/report": self._report,
        }
        answer = routes.get(self.path.partition("?")[0])
        if answer is None:
            self._send(404, "text/plain", f"there are {' '.join(routes)}\n".encode())
        else:
            answer()

    def do_HEAD(self) -> None:
        """As GET, without the body."""
        self.do_GET()

    def _state(self, word: str, reason: str) -> None:
        text = f"not {word}: {reason}" if reason else word
        self._send(503 if reason else 200, "text/plain; charset=utf-8", f"{text}\n".encode())

    def _report(self) -> None:
        if not (self.server.listen.report_public or self._is_local()):
            self._send(403, "text/plain", b"the report is for this machine alone (--report-public)\n")
            return
        document = json.dumps(self.server.answers.report(), indent=1, sort_keys=True).encode()
        self._send(200, "application/json", document + b"\n")

    def _is_local(self) -> bool:
        """Whether it is asked from this machine, and by its name: not by a page in a browser here."""
        host = self.headers.get("Host", "localhost")
        name = host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
        address = ipaddress.ip_address(self.client_address[0])
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback and name in _LOCAL_NAMES

    def _send(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *values: object) -> None:
        """Says nothing: probes come every second."""


def _break(request: socket.socket) -> None:
    try:
        request.shutdown(socket.SHUT_RDWR)
    except OSError:  # Gone already.
        return
