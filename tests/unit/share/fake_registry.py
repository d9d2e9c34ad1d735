"""A registry in the test's own process: the part of the distribution API that is spoken, and faults on demand."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

Fault = Callable[["Handler"], bool]
"""Is asked before each request is answered; True where it has answered itself."""


@dataclass
class FakeRegistry:
    """What is stored, what was asked (``METHOD path``), and how it misbehaves."""

    port: int = 0
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    ranges: list[str | None] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    has_ranges: bool = True
    is_deaf: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: threading.Event = field(default_factory=threading.Event)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def add_blob(self, data: bytes) -> str:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.blobs[digest] = data
        return digest

    def num_requests(self, method: str, pattern: str = "") -> int:
        return sum(bool(re.search(pattern, line)) for line in self.log if line.startswith(f"{method} "))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    registry: FakeRegistry

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle_one(self) -> None:
        registry, path = self.registry, urlsplit(self.path).path
        if registry.is_deaf and self.command == "PUT":
            registry.closed.wait(5)
            return
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with registry.lock:
            registry.log.append(f"{self.command} {self.path}")
            registry.ranges.append(self.headers.get("Range"))
            registry.authorizations.append(self.headers.get("Authorization"))
        if any(fault(self) for fault in tuple(registry.faults)):
            return
        if path == "/v2/":
            self.answer(200)
        elif "/blobs/uploads" in path:
            self._upload()
        elif "/blobs/" in path:
            self._blob(path.rpartition("/")[2])
        else:
            self._manifest(path.rpartition("/")[2])

    def _upload(self) -> None:
        if self.command == "POST":
            self.answer(202, Location=f"{urlsplit(self.path).path}1?_state=x")
            return
        (digest,) = parse_qs(urlsplit(self.path).query)["digest"]
        if digest != f"sha256:{hashlib.sha256(self.body).hexdigest()}":
            self.answer(
                400, b'{"errors":[{"code":"DIGEST_INVALID","message":"provided digest did not match"}]}'
            )
            return
        self.registry.blobs[digest] = self.body
        self.answer(201, Docker_Content_Digest=digest)

    def _blob(self, digest: str) -> None:
        data = self.registry.blobs.get(digest)
        if data is None:
            self.answer(404)
            return
        found = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if not (found and self.registry.has_ranges):
            self.answer(200, data)
        elif int(found[1]) >= len(data):
            self.answer(416)
        else:
            start = int(found[1])
            self.answer(206, data[start:], Content_Range=f"bytes {start}-{len(data) - 1}/{len(data)}")

    def _manifest(self, reference: str) -> None:
        if self.command == "PUT":
            digest = f"sha256:{hashlib.sha256(self.body).hexdigest()}"
            self.registry.manifests[reference] = self.registry.manifests[digest] = self.body
            self.answer(201, Docker_Content_Digest=digest)
        elif reference in self.registry.manifests:
            data = self.registry.manifests[reference]
            self.answer(200, data, Docker_Content_Digest=f"sha256:{hashlib.sha256(data).hexdigest()}")
        else:
            self.answer(404)

    do_GET = do_PUT = do_POST = do_HEAD = handle_one  # noqa: N815 - http.server's names

    def log_message(self, *args: object) -> None:
        """Says nothing."""


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *args: object) -> None:
        """Connections are broken on purpose."""


@contextmanager
def fake_registry() -> Iterator[FakeRegistry]:
    registry = FakeRegistry()
    handler = type("BoundHandler", (Handler,), {"registry": registry})
    with QuietServer(("127.0.0.1", 0), handler) as server:
        registry.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield registry
        finally:
            registry.closed.set()
            server.shutdown()
            thread.join()


def times(count: int, fault: Fault) -> Fault:
    """`fault`, for the first `count` requests that it answers."""
    left = [count]

    def limited(handler: Handler) -> bool:
        if left[0] <= 0:
            return False
        answered = fault(handler)
        left[0] -= answered
        return answered

    return limited


def on(method: str, pattern: str, act: Callable[[Handler], None]) -> Fault:
    """Lets `act` answer what matches."""

    def fault(handler: Handler) -> bool:
        if handler.command != method or not re.search(pattern, handler.path):
            return False
        act(handler)
        return True

    return fault


def status(code: int, body: bytes = b"", **headers: str) -> Callable[[Handler], None]:
    return lambda handler: handler.answer(code, body, **headers)


def cut_after(num_bytes: int) -> Callable[[Handler], None]:
    """Sends the right headers and the first bytes from where was asked, and breaks off."""

    def act(handler: Handler) -> None:
        data = handler.registry.blobs[handler.path.rpartition("/")[2]]
        found = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range") or "")
        start = int(found[1]) if found else 0
        extra = {"Content_Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if found else {}
        rest = data[start:]
        handler.answer(206 if found else 200, rest[:num_bytes], Content_Length=str(len(rest)), **extra)
        handler.wfile.flush()
        handler.close_connection = True
        handler.connection.shutdown(2)

    return act


def trickle(head: bytes, *pieces: bytes, pause_seconds: float = 0.02) -> Callable[[Handler], None]:
    """Sends `head`, then `pieces` again and again, each after a pause, until the client or the registry goes away."""

    def act(handler: Handler) -> None:
        handler.close_connection = True
        handler.connection.sendall(head)
        for piece in itertools.cycle(pieces):
            if handler.registry.closed.wait(pause_seconds):
                return
            handler.connection.sendall(piece)

    return act


def ask_for_basic(handler: Handler, user_and_password: str) -> bool:
    """A fault: refuses whoever does not come with that user and password."""
    if (
        handler.headers.get("Authorization")
        == f"Basic {base64.b64encode(user_and_password.encode()).decode()}"
    ):
        return False
    handler.answer(401, Www_Authenticate='Basic realm="here"')
    return True
