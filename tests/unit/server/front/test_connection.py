"""Clients that keep a server waiting, that are too many, or that do not speak HTTP: over a real socket."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import logging
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from aotgaudi.engine.output import TokenEvent
from aotgaudi.server.app import create_app
from aotgaudi.server.front.connection import Connection
from aotgaudi.server.front.limits import ConnectionLimits, Reason
from aotgaudi.server.front.listener import Incidents
from aotgaudi.server.front.run import HttpServer, StopTimes, bind
from aotgaudi.server.service import Service
from tests.unit.server.conftest import FakeEngine

WAIT_SECONDS = 10
QUICK = ConnectionLimits(
    client_seconds=0.3, least_bytes_per_second=1000, idle_seconds=0.3, linger_seconds=0.3, max_connections=100
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
        (b"GET /ready HTTP/1.1\r\nHost: a\r\n\r\n", "idle", b"HTTP/1.1 200 "),
        (b"GET /ready HTTP/1.1\r\nHost: a\r\n\r\nGET /", "head_timeout", b"HTTP/1.1 200 "),
        (HEAD + b'Content-Length: 99\r\n\r\n{"prompt"', "body_timeout", b"HTTP/1.1 408 "),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n9\r\n{", "body_timeout", b"HTTP/1.1 408 "),
        (HEAD + b"Content-Length: 9999999\r\n\r\n{", "body_timeout", b"HTTP/1.1 413 "),
    ],
)
def test_who_stops_sending_is_let_go(serve: Serve, sent: bytes, reason: Reason, answer: bytes) -> None:
    running = serve(QUICK)

    assert read(running.connect(sent))[: len(answer)] == answer

    assert running.closed == {reason: 1}
    assert running.server.num_connections == 0


@pytest.mark.parametrize(
    ("head", "reason"),
    [(b"GET /", "head_timeout"), (HEAD + b"Content-Length: 99\r\n\r\n", "body_timeout")],
)
def test_who_sends_a_byte_now_and_then_is_let_go(serve: Serve, head: bytes, reason: Reason) -> None:
    running = serve(QUICK)
    client = running.connect(head)

    for _ in range(20):
        with contextlib.suppress(OSError):
            client.sendall(b"a")
        time.sleep(0.03)

    assert running.closed == {reason: 1}
    client.close()


def test_who_has_had_an_answer_goes_before_those_who_come_at_once(serve: Serve, service: Service) -> None:
    running = serve(ConnectionLimits())
    client = http.client.HTTPConnection(*running.address, timeout=WAIT_SECONDS)

    for _ in range(2):
        client.request("POST", "/v1/completions", '{"prompt": "a"}', {"Content-Type": "application/json"})
        assert client.getresponse().read()
    client.close()

    assert service.intake.known == [False, True]


def test_where_there_is_no_room_a_new_client_is_told_at_once_and_is_known_when_it_comes_back(
    serve: Serve, service: Service, engine: FakeEngine
) -> None:
    running, question = serve(ConnectionLimits()), HEAD + b'Content-Length: 15\r\n\r\n{"prompt": "a"}'
    known = http.client.HTTPConnection(*running.address, timeout=WAIT_SECONDS)
    known.request("GET", "/version")
    known.getresponse().read()
    engine.is_full = True

    late, leaving = (
        running.connect(question),
        running.connect(question.replace(b"Host", b"Connection: close\r\nHost")),
    )
    for client in (late, leaving):
        received = client.recv(1 << 16)
        assert received.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
        assert b"\r\nRetry-After: 1\r\n" in received
        assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["type"] == "rate_limit_error"
    assert leaving.recv(1) == b""
    assert running.status("/health") == 200
    assert service.intake.known == []

    known.request("POST", "/v1/completions", '{"prompt": "a"}', {"Content-Type": "application/json"})
    assert known.getresponse().status == 200
    late.sendall(question)
    assert late.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    assert service.intake.known == [True, True]
    for client in (late, leaving, known):
        client.close()


def test_where_there_is_no_room_what_does_not_come_whole_is_read_as_ever(
    serve: Serve, engine: FakeEngine
) -> None:
    running, engine.is_full = serve(ConnectionLimits()), True
    client = running.connect(HEAD + b"Content-Length: 15\r\n")
    time.sleep(0.05)
    client.sendall(b'\r\n{"prompt": "a"}')

    assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
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


def test_who_does_not_read_is_let_go_and_the_request_is_aborted(serve: Serve, engine) -> None:
    engine.script = lambda i: [TokenEvent(request_id=i, text="x" * 4096, token_ids=(1,)) for _ in range(2000)]
    running = serve(QUICK)
    body = json.dumps({"prompt": "a", "stream": True}).encode()

    client = running.connect(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))

    assert engine.aborted.get(timeout=WAIT_SECONDS) == engine.added[0].request_id
    assert running.closed == {"write_timeout": 1}
    client.close()


def test_who_reads_slowly_but_enough_gets_everything(serve: Serve, engine) -> None:
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


def test_a_further_client_takes_the_place_of_whoever_kept_us_waiting_longest(serve: Serve) -> None:
    limits = ConnectionLimits(max_connections=3)
    running = serve(limits)
    idle = [running.connect() for _ in range(3)]
    running.until(lambda: running.server.num_connections == 3)
    idle[0].sendall(b"GET /")  # No longer the one that has been silent for longest.
    time.sleep(0.4)

    assert running.status() == 200

    assert running.closed == {"evicted": 1}
    assert idle[1].recv(1) == b""
    idle[0].sendall(b"ready HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    assert read(idle[0]).startswith(b"HTTP/1.1 200 ")
    for client in idle[1:]:
        client.close()


def test_where_all_connections_are_answering_a_further_client_gets_503(serve: Serve, engine, scripts) -> None:
    engine.script = scripts["hold"]
    running = serve(ConnectionLimits(max_connections=2))
    body = json.dumps({"prompt": "a", "stream": True}).encode()
    busy = [running.connect(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)) for _ in range(2)]
    for client in busy:
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")

    answer = read(running.connect(b"GET /ready HTTP/1.1\r\nHost: a\r\n\r\n"))

    assert answer.startswith(b"HTTP/1.1 503 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "service_unavailable"
    assert running.closed == {"refused": 1}
    for client in busy:
        client.close()


def test_in_a_crowd_nobody_makes_room_before_what_it_sent_is_read(serve: Serve, engine, scripts) -> None:
    engine.script = scripts["hold"]
    running = serve(ConnectionLimits(max_connections=20))
    body = json.dumps({"prompt": "a"}).encode()

    crowd = [running.connect(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)) for _ in range(60)]
    running.until(lambda: running.closed.total() == 40)

    assert running.closed == {"refused": 40}
    for client in crowd:
        client.close()


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n", b"HTTP/1.1 200"),
        (b"POST /health HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", b"HTTP/1.1 405"),
    ],
    ids=["probes", "requests"],
)
def test_who_comes_last_does_not_wait_for_a_whole_crowd_and_all_are_answered(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, question: bytes, answer: bytes
) -> None:
    answered: list[int] = []
    complete = Connection.on_response_complete

    def completed(self: Connection) -> None:
        assert self.client
        answered.append(self.client[1])
        complete(self)

    monkeypatch.setattr(Connection, "on_response_complete", completed)
    running = serve(ConnectionLimits())
    busy = threading.Event()
    running.server._listener._loop.call_soon_threadsafe(busy.wait, WAIT_SECONDS)

    crowd = [running.connect(question) for _ in range(400)]
    last = running.connect(question)
    busy.set()
    assert {client.recv(12) for client in (last, *crowd)} == {answer}

    assert answered.index(last.getsockname()[1]) < 200
    for client in (last, *crowd):
        client.close()


class _Scarce:
    """A socket that finds no descriptor for new connections, until told otherwise."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self.num_tries, self.error = listener, 0, errno.EMFILE

    def accept(self) -> tuple[socket.socket, object]:
        self.num_tries += 1
        if self.error:
            raise OSError(self.error, "Too many open files")
        return self._listener.accept()

    def __getattr__(self, name: str) -> object:
        return getattr(self._listener, name)


def test_without_descriptors_the_silent_make_room_and_nothing_spins(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    running = serve(ConnectionLimits())
    silent = running.connect()
    running.until(lambda: running.server.num_connections == 1)
    scarce = _Scarce(running.listener)
    running.server._listener._socket = scarce  # type: ignore[assignment]

    late = running.connect(b"GET /ready HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    assert silent.recv(1) == b""
    time.sleep(0.5)
    num_tries, scarce.error = scarce.num_tries, 0

    assert num_tries <= 12
    assert read(late).startswith(b"HTTP/1.1 200 ")
    assert running.closed["evicted"] == 1
    assert len(caplog.records) <= 3
    assert not any(record.exc_info for record in caplog.records)
    silent.close()


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
    running.until(lambda: b"not_found" in client.recv(1 << 16, socket.MSG_PEEK))

    client.sendall(b"zz\r\n")

    assert read(client).startswith(b"HTTP/1.1 404 ")
    assert running.closed == {"malformed": 1}
    assert not any(record.exc_info for record in caplog.records)


def test_lines_in_a_body_may_end_as_they_like(serve: Serve) -> None:
    running = serve(ConnectionLimits())
    body = b'{"prompt":\n "a"\r\n }\n\n'

    sent = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)

    assert read(running.connect(sent)).startswith(b"HTTP/1.1 200 ")


def test_requests_sent_together_are_all_answered_with_turns_of_others_between_them(serve: Serve) -> None:
    running = serve(ConnectionLimits())
    one = b"GET /health HTTP/1.1\r\nHost: a\r\nX-Long: " + b"x" * 1000 + b"\r\n"
    began = time.monotonic()

    with ThreadPoolExecutor(1) as beside:
        received = beside.submit(
            lambda: read(running.connect((one + b"\r\n") * 1999 + one + b"Connection: close\r\n\r\n"))
        )
        assert running.status() == 200
        assert not received.done()
        assert received.result().count(b"HTTP/1.1 200 ") == 2000

    assert time.monotonic() - began >= 1999 * 0.001


def test_two_hundred_malformed_requests_are_two_lines(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    running = serve(ConnectionLimits())

    with caplog.at_level(logging.INFO):
        for _ in range(200):
            read(running.connect(b"nonsense\r\n\r\n"))

    assert running.closed == {"malformed": 200}
    messages = [record.getMessage() for record in caplog.records if "HTTP/1.1" in record.getMessage()]
    assert len(messages) <= 2
    assert messages[0].endswith("the last from 127.0.0.1")


def test_what_happens_often_is_counted_at_once_and_logged_with_its_number_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counted: Counter[Reason] = Counter()
    now = [0.0]
    incidents = Incidents(lambda reason: counted.update([reason]), lambda: now[0])

    for number in range(5):
        incidents.add("malformed", f"10.0.0.{number}")
    now[0] = 11.0
    incidents.tell()
    incidents.tell()

    assert counted == {"malformed": 5}
    assert [record.args[0] for record in caplog.records] == [1, 4]  # type: ignore[index]
    assert caplog.records[1].getMessage().endswith("10.0.0.4")


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
