"""Clients that keep a server waiting, that are too many, or that do not speak HTTP: over a real socket."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.engine.output import TokenEvent
from aotgaudi.server.app import create_app
from aotgaudi.server.connection import Closures, StrictReader
from aotgaudi.server.listener import bind
from aotgaudi.server.options import ConnectionLimits, Reason, StopTimes
from aotgaudi.server.run_and_drain import HttpServer
from aotgaudi.server.service import Service

WAIT_SECONDS = 10
QUICK = ConnectionLimits(
    client_seconds=0.3, least_bytes_per_second=1000, idle_seconds=0.8, max_connections=100
)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"


class Running:
    """A server on a thread of its own, and why it closed connections."""

    def __init__(self, service: Service, limits: ConnectionLimits) -> None:
        self.closed: Counter[Reason] = Counter()
        listening = threading.Event()
        self.listener = bind("127.0.0.1", 0)
        self.address = self.listener.getsockname()
        self.server = HttpServer(
            create_app(service),
            self.listener,
            service,
            on_listening=lambda *_: listening.set(),
            stop_times=StopTimes(delay=0, drain=1, flush=0.5),
            limits=limits,
            on_close=lambda reason: self.closed.update([reason]),
        )
        self.thread = threading.Thread(target=self.server.run_until_stopped, daemon=True)
        self.thread.start()
        assert listening.wait(WAIT_SECONDS)

    def connect(self, data: bytes = b"") -> socket.socket:
        client = socket.create_connection(self.address, timeout=WAIT_SECONDS)
        client.sendall(data)
        return client

    def status(self, path: str = "/ready") -> int:
        connection = http.client.HTTPConnection(*self.address, timeout=WAIT_SECONDS)
        connection.request("GET", path)
        status = connection.getresponse().status
        connection.close()
        return status

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)


Serve = Callable[[ConnectionLimits], Running]


@pytest.fixture
def serve(service: Service) -> Iterator[Serve]:
    with ExitStack() as stack:

        @contextmanager
        def start(limits: ConnectionLimits) -> Iterator[Running]:
            running = Running(service, limits)
            yield running
            running.server.stop()
            running.thread.join(WAIT_SECONDS)
            assert not running.thread.is_alive()

        yield lambda limits: stack.enter_context(start(limits))


def read(client: socket.socket) -> bytes:
    """Everything until the server closes."""
    received = b""
    with client:
        while chunk := client.recv(1 << 16):
            received += chunk
    return received


@pytest.mark.parametrize(
    ("sent", "reason", "answer"),
    [
        (b"", "head_timeout", b""),
        (b"GET /ready HTT", "head_timeout", b"HTTP/1.1 408 "),
        (b"GET /ready HTTP/1.1\r\nHost: a\r\n\r\n", None, b"HTTP/1.1 200 "),
        (b"GET /ready HTTP/1.1\r\nHost: a\r\n\r\nGET /", "head_timeout", b"HTTP/1.1 200 "),
        (HEAD + b'Content-Length: 99\r\n\r\n{"prompt"', "body_timeout", b"HTTP/1.1 408 "),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n9\r\n{", "body_timeout", b"HTTP/1.1 408 "),
        (HEAD + b"Content-Length: 9999999\r\n\r\n{", "body_timeout", b"HTTP/1.1 413 "),
    ],
)
def test_a_client_that_stops_sending_is_let_go(
    serve: Serve, sent: bytes, reason: Reason | None, answer: bytes
) -> None:
    """Without a reason: no further request came, which uvicorn does not count."""
    running = serve(QUICK)

    assert read(running.connect(sent))[: len(answer)] == answer

    assert running.closed == ({} if reason is None else {reason: 1})
    assert running.server.num_connections == 0


@pytest.mark.parametrize(
    ("head", "reason"),
    [(b"GET /", "head_timeout"), (HEAD + b"Content-Length: 99\r\n\r\n", "body_timeout")],
)
def test_a_client_that_sends_a_byte_now_and_then_is_let_go(serve: Serve, head: bytes, reason: Reason) -> None:
    running = serve(QUICK)
    client = running.connect(head)

    for _ in range(20):
        with contextlib.suppress(OSError):
            client.sendall(b"a")
        time.sleep(0.03)

    assert running.closed == {reason: 1}
    client.close()


def test_a_slow_body_that_moves_enough_is_taken(serve: Serve) -> None:
    running = serve(replace(QUICK, least_bytes_per_second=100))
    body = json.dumps({"prompt": "a", "user": "b" * 900}).encode()
    client = running.connect(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body))

    for start in range(0, len(body), 100):
        client.sendall(body[start : start + 100])
        time.sleep(0.1)

    assert read(client).startswith(b"HTTP/1.1 200 ")
    assert not running.closed


def test_a_client_that_does_not_read_is_let_go_and_its_request_aborted(serve: Serve, engine) -> None:
    engine.script = lambda i: [TokenEvent(request_id=i, text="x" * 4096, token_ids=(1,)) for _ in range(2000)]
    running = serve(QUICK)
    body = json.dumps({"prompt": "a", "stream": True}).encode()

    client = running.connect(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))

    assert engine.aborted.get(timeout=WAIT_SECONDS) == engine.added[0].request_id
    assert running.closed == {"write_timeout": 1}
    client.close()


def test_a_client_that_reads_slowly_but_enough_gets_everything(serve: Serve, engine) -> None:
    pieces = 500
    engine.script = lambda i: [
        TokenEvent(
            request_id=i, text="x" * 4096, token_ids=(1,), finish_reason="stop" if n == pieces else None
        )
        for n in range(1, pieces + 1)
    ]
    running = serve(QUICK)
    body = json.dumps({"prompt": "a", "stream": True}).encode()
    client = running.connect(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))

    received = b""
    while b"[DONE]" not in received[-100:]:
        received += client.recv(1 << 16)
        time.sleep(0.02)

    assert received.count(b"x" * 4096) == pieces
    assert "write_timeout" not in running.closed
    client.close()


def test_bodies_that_wait_do_not_add_up_without_end(serve: Serve) -> None:
    running = serve(ConnectionLimits())
    num_bytes = 4 * 1024 * 1024 - 99
    head = HEAD + b"Content-Length: %d\r\n\r\n" % (num_bytes + 99)
    clients = [running.connect(head + b" " * num_bytes) for _ in range(20)]

    refused = [client for client in clients if _answered(client)]

    assert len(refused) == 4
    assert refused[0].recv(100).startswith(b"HTTP/1.1 429 ")
    small = json.dumps({"prompt": "a"}).encode()
    sent = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(small), small)
    assert read(running.connect(sent)).startswith(b"HTTP/1.1 200 ")
    for client in clients:
        client.close()


def _answered(client: socket.socket) -> bool:
    return bool(select.select([client], [], [], 0.05)[0])


def test_a_connection_beyond_the_limit_gets_503_and_the_others_are_served(serve: Serve) -> None:
    running = serve(ConnectionLimits(max_connections=2))
    held = [running.connect(), running.connect()]
    running.until(lambda: running.server.num_connections == 2)

    answer = read(running.connect())

    assert answer.startswith(b"HTTP/1.1 503 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 503
    assert running.closed == {"refused": 1}
    held[0].sendall(b"GET /ready HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    assert read(held[0]).startswith(b"HTTP/1.1 200 ")
    running.until(lambda: running.server.num_connections == 1)
    assert running.status() == 200
    held[1].close()


def test_a_client_that_reads_nothing_in_time_for_the_end_of_its_answer_is_let_go(
    serve: Serve, engine
) -> None:
    """The server has written the whole answer, and closed the connection; only the kernel's buffer is full."""
    big = 4_000_000
    engine.script = lambda i: [TokenEvent(request_id=i, text="x" * big, token_ids=(1,), finish_reason="stop")]
    running = serve(QUICK)
    body = json.dumps({"prompt": "a"}).encode()

    client = running.connect(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    running.until(lambda: running.closed.total() == 1)

    assert running.closed == {"write_timeout": 1}
    running.until(lambda: running.server.num_connections == 0)
    client.close()


def test_requests_sent_together_are_all_answered(serve: Serve) -> None:
    running = serve(ConnectionLimits())
    one = b"GET /health HTTP/1.1\r\nHost: a\r\nX-Long: " + b"x" * 1000 + b"\r\n"

    received = read(running.connect((one + b"\r\n") * 999 + one + b"Connection: close\r\n\r\n"))

    assert received.count(b"HTTP/1.1 200 ") == 1000


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n", "illegal"),
        (b"GET / HTTP/1.1\nHost: a\n\n", "without CR"),
        (b"GET / HTTP/1.1\r\nHost: a\nX: b\r\n\r\n", "without CR"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: b\r\n c\r\n\r\n", "folded"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: b\r\n\tc\r\n\r\n", "folded"),
        (
            HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\n",
            "exclude",
        ),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "HTTP/1.0"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 20_000, "too long"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: x\r\n" * 4000 + b"\r\n", "too long"),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", "HTTP/1.1"),
    ],
)
def test_what_is_not_strictly_http_is_refused_and_the_connection_closed(
    serve: Serve, sent: bytes, said: str
) -> None:
    running = serve(ConnectionLimits())

    answer = read(running.connect(sent))

    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 ", b"HTTP/1.1 505 "))
    assert b"connection: close" in head.lower()
    assert said in json.loads(body)["error"]["message"]
    assert running.closed == {"malformed": 1}


def test_a_chunk_that_is_malformed_after_the_answer_closes_quietly(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    running = serve(ConnectionLimits())
    client = running.connect(b"POST /none HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    running.until(lambda: b"Not Found" in client.recv(1 << 16, socket.MSG_PEEK))

    client.sendall(b"zz\r\n")

    assert read(client).startswith(b"HTTP/1.1 404 ")
    assert running.closed == {"malformed": 1}
    assert not any(record.exc_info for record in caplog.records)


def test_lines_in_a_body_may_end_as_they_like(serve: Serve) -> None:
    running = serve(ConnectionLimits())
    body = b'{"prompt":\n "a"\r\n }\n\n'

    sent = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)

    assert read(running.connect(sent)).startswith(b"HTTP/1.1 200 ")


def test_two_hundred_malformed_requests_are_two_lines(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    running = serve(ConnectionLimits())

    with caplog.at_level(logging.INFO):
        for _ in range(200):
            read(running.connect(b"nonsense\r\n\r\n"))

    assert running.closed == {"malformed": 200}
    messages = [record.getMessage() for record in caplog.records if "HTTP/1.1" in record.getMessage()]
    assert len(messages) <= 2
    assert messages[0].endswith("the last from 127.0.0.1")


def test_closures_are_counted_at_once_and_logged_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    counted: Counter[Reason] = Counter()
    now = [0.0]
    closures = Closures(lambda reason: counted.update([reason]), lambda: now[0])

    for number in range(5):
        closures.add("malformed", f"10.0.0.{number}")
    now[0] = 11.0
    closures.add("malformed", "10.0.0.5")

    assert counted == {"malformed": 6}
    assert [record.args[0] for record in caplog.records] == [1, 5]  # type: ignore[index]
    assert caplog.records[1].getMessage().endswith("10.0.0.5")


def test_stopping_does_not_wait_for_clients_that_do_not_read(
    serve: Serve, engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.script = lambda i: [TokenEvent(request_id=i, text="x" * 4096, token_ids=(1,)) for _ in range(500)]
    running = serve(ConnectionLimits())
    body = json.dumps({"prompt": "a", "stream": True}).encode()
    clients = [running.connect(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)) for _ in range(10)]
    for client in clients:
        client.recv(10)

    started = time.monotonic()
    running.server.stop()
    running.thread.join(WAIT_SECONDS)

    assert time.monotonic() - started < 4
    assert not any(record.exc_info for record in caplog.records)
    for client in clients:
        client.close()


# What is sent is what h11 sends, though chunks take a short cut

REQUESTS = {
    "HTTP/1.1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "HTTP/1.0": b"GET / HTTP/1.0\r\n\r\n",
    "HEAD": b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n",
}


def sent(connection: h11.Connection, request: bytes, length: int | None, chunks: list[bytes]) -> bytes:
    connection.receive_data(request)
    connection.next_event()
    headers = [] if length is None else [("content-length", str(length))]
    events: list[h11.Event] = [h11.Response(status_code=200, headers=headers, reason=b"OK")]
    events += [h11.Data(data=chunk) for chunk in chunks]
    return b"".join(connection.send(event) or b"" for event in [*events, h11.EndOfMessage()])


@given(
    name=st.sampled_from(sorted(REQUESTS)),
    chunks=st.lists(st.binary(max_size=40) | st.just(bytes(300)), max_size=5),
    is_chunked=st.booleans(),
)
def test_answers_are_those_of_h11(name: str, chunks: list[bytes], is_chunked: bool) -> None:
    chunks = [] if name == "HEAD" else chunks
    length = None if is_chunked else sum(map(len, chunks))

    ours = sent(StrictReader(), REQUESTS[name], length, chunks)

    assert ours == sent(h11.Connection(h11.SERVER), REQUESTS[name], length, chunks)


def test_a_chunk_out_of_turn_is_refused() -> None:
    connection = StrictReader()
    sent(connection, REQUESTS["HTTP/1.1"], None, [b"a"])

    with pytest.raises(h11.LocalProtocolError):
        connection.send(h11.Data(data=b"b"))
