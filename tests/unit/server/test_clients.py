"""Clients that keep a server waiting, that are too many, or that do not speak HTTP: over a real socket.

That slow ones are closed is a proxy's task (ci/templates/nginx.conf).
"""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx
import pytest

from aotgaudi.engine.output import TokenEvent
from aotgaudi.server.service import Service
from tests.unit.server.conftest import WAIT_SECONDS, Running, serving

STOP_SECONDS = 10
"""What a server does in the end is bounded by 3 s in all. Those clients would stay for ever."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"


class Server:
    """A server on a thread."""

    def __init__(self, running: Running) -> None:
        self.server, self.thread = running.server, running.thread
        self.address = httpx.URL(running.url).host, httpx.URL(running.url).port

    def connect(self, data: bytes = b"") -> socket.socket:
        client = socket.create_connection(self.address, timeout=WAIT_SECONDS)
        client.sendall(data)
        return client

    def status(self, path: str = "/ready") -> int:
        return httpx.get("http://{}:{}{}".format(*self.address, path), timeout=WAIT_SECONDS).status_code

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)


Serve = Callable[..., Server]


@pytest.fixture
def serve(service: Service) -> Iterator[Serve]:
    with ExitStack() as stack:
        yield lambda **options: Server(stack.enter_context(serving(service, **options)))


def read(client: socket.socket) -> bytes:
    """Everything until the server closes."""
    received = b""
    with client:
        while chunk := client.recv(1 << 16):
            received += chunk
    return received


def test_clients_that_never_finish_keep_no_other_waiting_and_the_stop_briefly(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    running = serve()
    pieces = (b"", b"GET /ready HTT", HEAD + b'Content-Length: 99\r\n\r\n{"prompt"')
    clients = [running.connect(piece) for piece in pieces * 50]
    running.until(lambda: running.server.num_connections == len(clients))

    assert running.status() == 200

    started = time.monotonic()
    running.server.stop()
    running.thread.join(WAIT_SECONDS)
    assert time.monotonic() - started < STOP_SECONDS
    assert not any(record.exc_info for record in caplog.records)
    for client in clients:
        client.close()


def test_the_server_writes_no_more_than_a_client_reads(serve: Serve, engine) -> None:
    is_made = threading.Event()

    def script(request_id: str) -> Iterator[TokenEvent]:
        for _ in range(1000):
            yield TokenEvent(request_id=request_id, text="x" * 65536, token_ids=(1,))
        is_made.set()

    engine.script = script
    running = serve()
    body = json.dumps({"prompt": "a", "stream": True}).encode()
    client = running.connect(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
    assert is_made.wait(WAIT_SECONDS)

    (connection,) = running.server.server_state.connections
    assert connection.transport.get_write_buffer_size() < 512 * 1024
    assert running.status() == 200
    client.close()
    assert engine.aborted.get(timeout=WAIT_SECONDS) == engine.added[0].request_id


def test_bodies_that_wait_do_not_add_up_without_end(serve: Serve) -> None:
    running = serve()
    num_bytes = 4 * 1024 * 1024 - 99
    head = HEAD + b"Content-Length: %d\r\n\r\n" % (num_bytes + 99)
    clients = [running.connect(head + b" " * num_bytes) for _ in range(20)]

    running.until(lambda: len(_answered(clients)) >= 4)
    refused = _answered(clients)

    assert len(refused) == 4
    assert refused[0].recv(100).startswith(b"HTTP/1.1 429 ")
    small = json.dumps({"prompt": "a"}).encode()
    sent = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(small), small)
    assert read(running.connect(sent)).startswith(b"HTTP/1.1 200 ")
    for client in clients:
        client.close()


def _answered(clients: list[socket.socket]) -> list[socket.socket]:
    return select.select(clients, [], [], 0)[0]


def test_beyond_the_limit_of_connections_requests_get_503_until_there_are_fewer(serve: Serve) -> None:
    running = serve(max_connections=2)
    held = [running.connect(), running.connect()]
    running.until(lambda: running.server.num_connections == 2)

    assert running.status() == 503

    running.until(lambda: running.server.num_connections == 2)
    held[0].sendall(b"GET /ready HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    assert read(held[0]).startswith(b"HTTP/1.1 200 ")
    running.until(lambda: running.server.num_connections == 1)
    assert running.status() == 200
    held[1].close()


def test_requests_sent_together_are_all_answered(serve: Serve) -> None:
    running = serve()
    one = b"GET /health HTTP/1.1\r\nHost: a\r\nX-Long: " + b"x" * 1000 + b"\r\n"

    received = read(running.connect((one + b"\r\n") * 999 + one + b"Connection: close\r\n\r\n"))

    assert received.count(b"HTTP/1.1 200 ") == 1000


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 20_000,
    ],
)
def test_what_is_not_http_is_refused_and_the_connection_closed(serve: Serve, sent: bytes) -> None:
    head = read(serve().connect(sent)).partition(b"\r\n\r\n")[0]

    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in head.lower()


def test_lines_in_a_body_may_end_as_they_like(serve: Serve) -> None:
    running = serve()
    body = b'{"prompt":\n "a"\r\n }\n\n'

    sent = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)

    assert read(running.connect(sent)).startswith(b"HTTP/1.1 200 ")


def test_stopping_does_not_wait_for_clients_that_do_not_read(
    serve: Serve, engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.script = lambda i: [TokenEvent(request_id=i, text="x" * 4096, token_ids=(1,)) for _ in range(500)]
    running = serve()
    body = json.dumps({"prompt": "a", "stream": True}).encode()
    clients = [running.connect(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)) for _ in range(10)]
    for client in clients:
        client.recv(10)

    started = time.monotonic()
    running.server.stop()
    running.thread.join(WAIT_SECONDS)

    assert time.monotonic() - started < STOP_SECONDS
    assert not any(record.exc_info for record in caplog.records)
    for client in clients:
        client.close()
