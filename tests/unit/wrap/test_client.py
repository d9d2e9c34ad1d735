"""Asking a server: its health and its warm-up requests, over HTTP, bounded, with what its clients must know."""

from __future__ import annotations

import itertools
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.bundle.launch import WarmUpRequest
from aotgaudi.errors import SpecError
from aotgaudi.wrap.adapters.base import Address
from aotgaudi.wrap.client import Answer, HealthProbe, WrappedServerError, ask, pinned, require_free
from aotgaudi.wrap.exercise import completion
from tests.certificates import Certificate, make_certificate


class Streams:
    """How many events each streamed answer has and how fast, where each waits until all have begun.

    `breaks_off` is the end of the ids of answers that break off.
    """

    def __init__(self) -> None:
        self.num_events: Iterator[int] = itertools.repeat(30)
        self.gate = threading.Barrier(1)
        self.breaks_off, self.pause_seconds = "", 0.002
        self.turn: AbstractContextManager[object] = nullcontext()


class FakeServer(ThreadingHTTPServer):
    """Answers as it is told, and keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.health = 200
        self.status, self.document = 200, {"choices": [{"text": "Rome"}]}
        self.asked: list[dict[str, Any]] = []
        self.headers: list[str | None] = []
        self.request_ids: list[str | None] = []
        self.ranks: list[str | None] = []
        self.certificate: Certificate | None = None
        self.missing_bytes = 0
        self.streams = Streams()

    @property
    def address(self) -> Address:
        certificate = None if self.certificate is None else str(self.certificate.certfile)
        place = Address(port=self.server_address[1], certificate=certificate)
        return replace(pinned(place), served_name="m", authorization="Bearer key")

    def use_tls(self, certificate: Certificate) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.certfile, certificate.keyfile)
        self.certificate = self.certificate or certificate
        plain = socket.socket(fileno=self.socket.detach())
        self.socket = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self.reply(self.server.health if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.headers.append(self.headers["Authorization"])
        self.server.request_ids.append(self.headers["X-Request-Id"])
        self.server.ranks.append(self.headers["X-data-parallel-rank"])
        if self.server.status == 0:
            self.close_connection = True
        elif self.server.status == 200 and self.server.asked[-1].get("stream"):
            self.stream(self.server.streams)
        else:
            self.reply(self.server.status, self.server.document)

    def reply(self, status: int, document: object) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) + self.server.missing_bytes))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, streams: Streams) -> None:
        with streams.turn:
            self.stream_now(streams)

    def stream_now(self, streams: Streams) -> None:
        num = next(streams.num_events)
        self.send_response(200)
        self.end_headers()
        for number in range(num):
            self.wfile.write(b'data: {"choices": []}\n\n')
            if number == 0 and num > 1:
                streams.gate.wait(30)
            time.sleep(streams.pause_seconds)
        if streams.breaks_off and str(self.headers["X-Request-Id"]).endswith(streams.breaks_off):
            return
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *values: object) -> None:
        pass


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return make_certificate(tmp_path)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as found:
        threading.Thread(target=found.serve_forever, args=(0.02,), daemon=True).start()
        yield found
        found.shutdown()


@pytest.fixture(params=["plain", "TLS"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FakeServer]:
    """A server without TLS, and one with it."""
    with FakeServer() as found:
        if request.param == "TLS":
            found.use_tls(make_certificate(tmp_path))
        threading.Thread(target=found.serve_forever, args=(0.02,), daemon=True).start()
        yield found
        found.shutdown()


def first_answer(address: Address) -> HealthProbe:
    probe = HealthProbe(address)
    probe.poll()
    while probe._connection is not None:
        probe.poll()
    return probe


def is_healthy(address: Address) -> bool:
    return first_answer(address).is_good


@pytest.mark.parametrize("has_tls", [False, True])
def test_a_health_question_that_nobody_answers_is_no_in_time(
    certificate: Certificate, has_tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(certificate.certfile) if has_tls else None
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address(port=silent.getsockname()[1], certificate=path)
        monkeypatch.setattr("aotgaudi.wrap.client.HEALTH_SECONDS", 60.0)
        with closing(HealthProbe(address)) as probe:
            probe.is_good, started = True, time.monotonic()
            assert probe.poll()
            assert time.monotonic() - started < 30, "it does not wait"
        monkeypatch.setattr("aotgaudi.wrap.client.HEALTH_SECONDS", 0.2)
        with closing(HealthProbe(address)) as probe:
            probe.is_good, started = True, time.monotonic()
            while probe.poll():
                time.sleep(0.01)
            assert 0.2 <= time.monotonic() - started < 30


def test_a_server_serves_when_its_health_is_200(either: FakeServer) -> None:
    assert is_healthy(either.address)
    either.health = 404
    assert not is_healthy(either.address)
    assert not is_healthy(Address(port=1))
    assert not is_healthy(Address(uds="/no/such/socket"))


def test_a_request_names_the_model_and_has_the_key_that_is_never_shown(server: FakeServer) -> None:
    answer = ask(server.address, completion("greedy"))

    assert answer == Answer(200, "Rome")
    assert server.asked[0]["model"] == "m"
    assert server.headers == ["Bearer key"]
    assert "key" not in repr(server.address)


def test_another_certificate_is_another_server_unless_the_file_has_it_now(
    server: FakeServer, certificate: Certificate, tmp_path: Path
) -> None:
    other = make_certificate(tmp_path, "other")
    server.use_tls(certificate)
    address = server.address
    own = certificate.certfile.read_bytes()
    assert is_healthy(address)

    certificate.certfile.write_bytes(other.certfile.read_bytes())
    assert is_healthy(address), "the file is replaced, and the server has not read it again"

    server.use_tls(other)
    assert is_healthy(address), "it has"
    assert ask(address, completion("greedy")).status == 200

    certificate.certfile.write_bytes(own)
    text = f"another server answers at 127.0.0.1:{address.port}: its certificate is not in --ssl-certfile"
    probe = first_answer(address)
    assert (probe.is_good, probe.problem) == (False, f"{text} {certificate.certfile}")
    with pytest.raises(WrappedServerError, match=f"the request 'greedy': {text}"):
        ask(address, completion("greedy"))


def test_one_with_tls_is_not_one_without(server: FakeServer, certificate: Certificate) -> None:
    address = server.address
    assert not is_healthy(pinned(replace(address, certificate=str(certificate.certfile))))
    server.use_tls(certificate)
    assert not is_healthy(address)


def test_the_first_certificate_of_a_chain_is_the_servers(
    server: FakeServer, certificate: Certificate, tmp_path: Path
) -> None:
    """Its key may be in the same file, and the others' owners are not to be trusted."""
    other = make_certificate(tmp_path, "other")
    server.use_tls(certificate)
    chain = certificate.keyfile.read_bytes() + certificate.certfile.read_bytes() + other.certfile.read_bytes()
    certificate.certfile.write_bytes(chain)
    address = server.address
    assert is_healthy(address)

    server.use_tls(other)
    assert not is_healthy(address)


@pytest.mark.parametrize("host", ["a b", "a..b", "x" * 64])
def test_a_host_that_can_be_none_is_the_users_mistake(host: str) -> None:
    with pytest.raises(SpecError, match="--host: is "):
        require_free(Address(host=host))


def test_a_server_gets_each_request_on_each_rank_and_one_without_ranks_no_header(server: FakeServer) -> None:
    request = completion("many", copies=2)

    assert ask(replace(server.address, ranks=3), request) == Answer(200, "Rome")
    assert server.ranks == ["0", "0", "1", "1", "2", "2"]
    ask(server.address, request)
    assert server.ranks[6:] == [None, None]

    server.status = 500
    with pytest.raises(WrappedServerError, match=r"'many' \(data-parallel rank 0\) with 500"):
        ask(replace(server.address, ranks=3), request)


def test_copies_are_sent_at_once(either: FakeServer) -> None:
    assert ask(either.address, completion("many", copies=5)) == Answer(200, "Rome")
    assert len(either.asked) == 5


def batch(num: int) -> WarmUpRequest:
    return completion("batch", copies=num, stream=True)


def test_streamed_copies_run_at_the_same_time(either: FakeServer) -> None:
    either.streams.gate, either.streams.num_events = threading.Barrier(3), itertools.repeat(300)

    assert ask(either.address, batch(3)) == Answer(200, "")
    assert len(either.asked) == 3


def test_streamed_copies_that_only_seem_to_run_at_the_same_time_are_a_problem(either: FakeServer) -> None:
    """The first is over before the second begins, but nobody has read it by then."""
    either.streams.turn, either.streams.pause_seconds = threading.Lock(), 0

    answer = ask(either.address, batch(2), lambda: time.sleep(0.3))

    assert answer.problem


def test_others_have_their_turn_while_answers_are_waited_for(either: FakeServer) -> None:
    server, turns = either, list[float]()
    server.streams.gate = threading.Barrier(2)

    ask(server.address, batch(2), lambda: turns.append(time.monotonic()))
    assert turns

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(server.address, completion("greedy"), stop)


def test_a_streamed_answer_that_breaks_off_is_an_error_that_names_it(server: FakeServer) -> None:
    server.streams.gate, server.streams.breaks_off = threading.Barrier(2), "-1"

    with pytest.raises(WrappedServerError, match="the request 'batch': the answer broke off") as raised:
        ask(server.address, batch(2))
    assert raised.value.request_id == "aotgaudi-batch-1"


def test_a_streamed_answer_that_does_not_go_on_is_an_error_that_names_it(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both copies begin within it, on a busy machine too.
    monkeypatch.setattr("aotgaudi.wrap.client.ANSWER_SECONDS", 2.0)
    server.streams.num_events = itertools.repeat(2)
    server.streams.gate = threading.Barrier(3)

    with pytest.raises(WrappedServerError, match="the request 'batch': no answer") as raised:
        ask(server.address, batch(2))
    assert raised.value.request_id == "aotgaudi-batch-0"
    server.streams.gate.wait(30)


def test_nobody_waits_for_a_server_that_is_silent_after_the_handshake(
    server: FakeServer, certificate: Certificate
) -> None:
    """Its socket is readable all the same: after the handshake TLS 1.3 sends tickets, which are no data."""
    server.use_tls(certificate)
    server.streams.gate = threading.Barrier(2)
    since: list[float] = [time.monotonic()]

    def turn() -> None:
        since.append(time.monotonic())
        if since[-1] - since[0] > 0.5:
            server.streams.gate.abort()

    with pytest.raises(WrappedServerError):
        ask(server.address, completion("waits", stream=True), turn)
    assert max(after - before for before, after in itertools.pairwise(since)) < 15  # It is silent for 30.


def test_others_have_their_turn_while_a_handshake_is_waited_for(certificate: Certificate) -> None:
    turns: list[float] = []

    def turn() -> None:
        turns.append(time.monotonic())
        if len(turns) == 3:
            raise KeyboardInterrupt

    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(KeyboardInterrupt):
        ask(
            Address(port=silent.getsockname()[1], certificate=str(certificate.certfile)),
            completion("a"),
            turn,
        )
    assert turns[-1] - turns[0] < 5


def test_an_answer_that_is_cut_off_is_an_error(either: FakeServer) -> None:
    either.missing_bytes = 1

    with pytest.raises(WrappedServerError, match="the request 'greedy'"):
        ask(either.address, completion("greedy"))


def test_copies_that_do_not_run_at_the_same_time_are_a_problem_and_sent_once(server: FakeServer) -> None:
    server.streams.num_events = itertools.repeat(1)

    answer = ask(server.address, batch(2))

    assert answer == Answer(200, "", "one of its 2 answers ended before the last had begun")
    assert len(server.asked) == 2


def test_each_copy_has_another_id_whatever_a_launch_calls_it(server: FakeServer) -> None:
    ask(server.address, completion("many", copies=3))
    ask(server.address, completion("odd\r\nHost: x\u20ac"))

    assert sorted(map(str, server.request_ids[:3])) == [f"aotgaudi-many-{copy}" for copy in range(3)]
    assert server.request_ids[3:] == ["aotgaudi-odd--Host--x--0"]


def test_a_refusal_is_an_answer(server: FakeServer) -> None:
    server.status = 400

    server.document = {"error": "no\ngrammar"}

    answer = ask(server.address, completion("json"))

    assert answer == Answer(400, "", '{"error": "no\\ngrammar"}')
    assert len({*answer.digests(is_greedy=True)}) == 1


@pytest.mark.parametrize("status", [500, 503, 0])
def test_no_answer_is_an_error_that_names_the_request(server: FakeServer, status: int) -> None:
    server.status = status

    with pytest.raises(WrappedServerError, match="the request 'logprobs'") as raised:
        ask(server.address, completion("logprobs"))
    assert raised.value.request_id == "aotgaudi-logprobs-0" == server.request_ids[0]


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"choices": [{"message": {"content": "a"}}, {"text": "b"}]}, "a\nb"),
        ({"choices": [{"text": None}]}, ""),
        ({"choices": "odd"}, ""),
        ({"other": 1}, ""),
        ([], ""),
    ],
)
def test_the_text_of_every_choice_counts(server: FakeServer, document: Any, text: str) -> None:
    server.document = document

    assert ask(server.address, completion("greedy")).text == text


def test_only_greedy_texts_are_compared_and_every_status() -> None:
    digests = {
        name: Answer(status, text).digests(is_greedy=greedy).whole for name, status, text, greedy in _ANSWERS
    }

    assert len(set(digests.values())) == 4
    assert digests["sampled"] == digests["sampled otherwise"]


_ANSWERS = [
    ("greedy", 200, "a", True),
    ("greedy otherwise", 200, "b", True),
    ("sampled", 200, "a", False),
    ("sampled otherwise", 200, "b", False),
    ("refused", 400, "", False),
]
