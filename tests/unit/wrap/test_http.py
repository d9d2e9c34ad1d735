"""What the supervisor answers, and to whom; slow clients keep nobody out; the metrics."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aotgaudi.errors import SpecError
from aotgaudi.wrap import http as app
from aotgaudi.wrap.http import METRICS, Answers, HttpServer, Metrics
from aotgaudi.wrap.run_options import Listen, parse_listen
from aotgaudi.wrap.verdict import Finding


@dataclass
class Desk:
    """What is to be answered."""

    not_ready: str = "the guest is starting"
    not_live: str = ""
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)

    def answers(self) -> Answers:
        report = {"verdict": "Warm"}
        return Answers(
            lambda: self.not_ready, lambda: self.not_live, lambda: report, self.metrics, self.notes
        )


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def front(desk: Desk) -> Iterator[HttpServer]:
    with HttpServer(Listen("127.0.0.1", 0), desk.answers()) as found:
        yield found


def get(front: HttpServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=30)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    try:
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_it_is_ready_when_the_server_is(front: HttpServer, desk: Desk) -> None:
    assert get(front, "/ready") == (503, "not ready: the guest is starting\n")
    desk.not_ready = ""
    assert get(front, "/ready") == (200, "ready\n")
    assert get(front, "/ready?probe=1", "HEAD") == (200, "")


def test_what_may_compile_is_said_with_the_state_in_text_and_in_json(desk: Desk) -> None:
    desk.notes = {"not_exercised": ["images: a reason"], "not_closed": ["penalties: a graph for each length"]}
    with HttpServer(Listen("127.0.0.1", 0), desk.answers()) as front:
        text = get(front, "/ready")
        desk.not_ready = ""
        status, document = get(front, "/ready", Accept="application/json")

    assert text[1].splitlines() == [
        "not ready: the guest is starting",
        "not exercised: images: a reason",
        "not closed: penalties: a graph for each length",
    ]
    assert (status, json.loads(document)) == (200, {"ready": True, "reason": "", **desk.notes})


def test_it_is_live_while_it_turns(front: HttpServer, desk: Desk) -> None:
    assert get(front, "/live") == (200, "live\n")
    desk.not_live = "no turn for 31 s"
    assert get(front, "/live") == (503, "not live: no turn for 31 s\n")


def test_metrics_and_the_report(front: HttpServer) -> None:
    assert "aotgaudi_guest_warm 0.0" in get(front, "/metrics")[1]
    assert json.loads(get(front, "/report")[1]) == {"verdict": "Warm"}


def test_an_error_of_ours_is_logged(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    def report() -> dict[str, str]:
        raise KeyError("verdict")

    answers = Answers(lambda: "", lambda: "", report, desk.metrics)
    with HttpServer(Listen("127.0.0.1", 0), answers) as front, pytest.raises(http.client.RemoteDisconnected):
        get(front, "/report")

    assert "a request from 127.0.0.1 failed" in caplog.text
    assert "KeyError: 'verdict'" in caplog.text


def test_what_is_not_there(front: HttpServer) -> None:
    assert get(front, "/")[0] == 404
    assert get(front, "/ready", "POST")[0] == 501


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:9400", 200),
        ("127.0.0.1", 200),
        ("[::1]:1", 200),
        ("evil.example", 403),
        ("127.0.0.1.x", 403),
    ],
)
def test_the_report_is_not_for_pages_in_a_browser_here(front: HttpServer, host: str, status: int) -> None:
    assert get(front, "/report", Host=host)[0] == status


def test_the_report_is_for_others_where_that_is_asked_for(desk: Desk) -> None:
    with HttpServer(Listen("127.0.0.1", 0, report_public=True), desk.answers()) as front:
        assert get(front, "/report", Host="metrics.example")[0] == 200


@pytest.mark.parametrize("request_bytes", [b"", b"GET /re", b"GET /ready HTTP/1.1\r\nHost: x\r\n"])
def test_slow_clients_keep_nobody_out(front: HttpServer, desk: Desk, request_bytes: bytes) -> None:
    desk.not_ready = ""
    slow = []
    for _ in range(2 * app.MAX_CONNECTIONS):
        one = socket.create_connection(("127.0.0.1", front.port))
        one.sendall(request_bytes)
        slow.append(one)

    assert get(front, "/ready") == (200, "ready\n")
    assert threading.active_count() < 3 * app.MAX_CONNECTIONS
    for one in slow:
        one.close()


def test_a_client_that_drips_is_broken_off(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "CLIENT_SECONDS", 0.2)
    with (
        HttpServer(Listen("127.0.0.1", 0), desk.answers()) as front,
        socket.create_connection(("127.0.0.1", front.port)) as slow,
    ):
        slow.settimeout(30)
        slow.sendall(b"GET /ready HTTP/1.1\r\n")

        assert slow.recv(100) == b""


def test_a_port_in_use_is_told_before_anything_starts(front: HttpServer, desk: Desk) -> None:
    with pytest.raises(SpecError, match=r"--listen 127\.0\.0\.1:\d+: cannot be listened on"):
        HttpServer(Listen("127.0.0.1", front.port), desk.answers())


@pytest.mark.parametrize(
    ("text", "listen"),
    [
        ("127.0.0.1:9400", Listen("127.0.0.1", 9400)),
        (":80", Listen("0.0.0.0", 80)),
        ("[::]:0", Listen("::", 0)),
        ("pod.example:1", Listen("pod.example", 1)),
    ],
)
def test_addresses(text: str, listen: Listen) -> None:
    assert parse_listen(text) == listen


@pytest.mark.parametrize("text", ["", "9400", "host", "host:", "host:x", "host:70000", "a b:1", "host:²"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(SpecError, match="--listen"):
        parse_listen(text)


def sample(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(metrics.text().decode())
    return {sample(one.name, **one.labels): one.value for family in families for one in family.samples}


def test_what_is_exposed_is_what_a_scraper_reads() -> None:
    metrics = Metrics()
    metrics.set("aotgaudi_guest_warm", True)
    metrics.set("aotgaudi_capture_info", 1, "id", 'C:\\"odd"\n')
    metrics.count(
        [Finding("triton", "live", "x"), Finding("triton", "live", "y"), Finding("file", "cold", "z")]
    )
    metrics.count_files(1_234_567)

    found = samples(metrics)

    assert found[sample("aotgaudi_guest_warm")] == 1
    assert found[sample("aotgaudi_capture_info", launch="id", bundle='C:\\"odd"\n')] == 1
    assert found[sample("aotgaudi_compilations_total", phase="live", what="triton")] == 2
    assert found[sample("aotgaudi_compilations_total", phase="load", what="process")] == 0
    assert found[sample("aotgaudi_cache_files_added_total")] == 1_234_567
    assert metrics.compilations() == {"live.triton": 2}


def test_every_metric_is_documented(pytestconfig: pytest.Config) -> None:
    documented = (pytestconfig.rootpath / "docs" / "metrics.md").read_text()

    assert [name for name in METRICS if f"`{name}`" not in documented] == []
