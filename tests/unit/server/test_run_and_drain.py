"""A real socket: a port in use, an engine that dies, signals, and what runs meanwhile."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aotgaudi.errors import SpecError
from aotgaudi.server.options import StopTimes
from aotgaudi.server.run_and_drain import HttpServer, bind
from aotgaudi.server.service import Service
from tests.unit.server.conftest import WAIT_SECONDS, serving


@pytest.mark.parametrize("dead", ["engine", "preprocessor"])
def test_a_server_without_engine_or_preprocessor_ends_by_itself(service: Service, dead: str) -> None:
    with serving(service, stop_times=StopTimes(delay=60, drain=60)) as running:
        assert running.thread.is_alive()

        getattr(service, dead).failure = RuntimeError("gone")

        running.thread.join(WAIT_SECONDS)
        assert not running.thread.is_alive()


def test_port_in_use_is_a_spec_error() -> None:
    with bind("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]

        with pytest.raises(SpecError, match=rf"127\.0\.0\.1:{port}: cannot be listened on") as caught:
            bind("127.0.0.1", port)

    assert caught.value.exit_code == 2


@pytest.fixture
def main_thread_serves() -> Iterator[None]:
    """A server of the main thread leaves its signals ignored, since its process ends: here it does not."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("main_thread_serves")
def test_port_that_is_taken_after_binding_is_a_spec_error(service: Service) -> None:
    with bind("127.0.0.1", 0) as mine:
        host, port = mine.getsockname()
        with bind(host, port) as other:
            other.listen()

            with pytest.raises(SpecError, match="cannot be listened on"):
                HttpServer(_unused_app, mine, service, on_listening=lambda *_: None).run_until_stopped()


async def _unused_app(scope: object, receive: object, send: object) -> None:
    raise AssertionError


def test_bad_address_is_a_spec_error() -> None:
    with pytest.raises(SpecError, match="cannot be listened on"):
        bind("no.such.host.invalid", 0)


@contextmanager
def slow_server(
    delay: float = 0, drain: float = 30, stderr: int = subprocess.PIPE
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server in a process of its own, and its port; see slow_server.py."""
    root = Path(__file__).parents[3]
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.server.slow_server", str(delay), str(drain)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )
    try:
        assert child.stdout is not None
        yield child, int(child.stdout.readline())
    finally:
        child.kill()
        child.communicate()


def ended(child: subprocess.Popen[str]) -> str:
    """Waits for the end, which must be in order. Returns the log."""
    log = child.communicate(timeout=WAIT_SECONDS)[1]
    assert child.returncode == 0, log
    assert "Traceback" not in log
    assert "CancelledError" not in log
    return log


def begin_stream(port: int, max_tokens: int) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Starts a stream, and reads its first event."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)
    body = json.dumps({"prompt": "a", "max_tokens": max_tokens, "stream": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    return connection, response


def status_of(port: int, method: str, path: str, body: str | None = None) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)
    connection.request(method, path, body, {"Content-Type": "application/json"})
    status = connection.getresponse().status
    connection.close()
    return status


def wait_until_it_drains(port: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while status_of(port, "GET", "/ready") != 503:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.process
def test_after_sigterm_the_socket_stays_open_and_answers_503_for_the_delay() -> None:
    with slow_server(delay=4.0) as (child, port):
        assert status_of(port, "GET", "/ready") == 200

        started = time.monotonic()
        child.send_signal(signal.SIGTERM)
        wait_until_it_drains(port)

        assert status_of(port, "POST", "/v1/completions", json.dumps({"prompt": "a"})) == 503
        assert status_of(port, "GET", "/health") == 200
        ended(child)
        assert time.monotonic() - started >= 4.0


@pytest.mark.process
@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]])
def test_sigint_and_a_second_sigterm_do_without_the_delay(signals: list[signal.Signals]) -> None:
    with slow_server(delay=60) as (child, port):
        for sig in signals[:-1]:
            child.send_signal(sig)
            wait_until_it_drains(port)  # Two signals of a kind that wait to be handled are one.
        child.send_signal(signals[-1])

        ended(child)


@pytest.mark.process
def test_a_running_stream_is_let_to_its_end() -> None:
    with slow_server() as (child, port):
        connection, response = begin_stream(port, max_tokens=50)
        child.send_signal(signal.SIGTERM)

        text = response.read().decode()
        connection.close()

        assert '"finish_reason":"length"' in text
        assert text.endswith("data: [DONE]\n\n")
        assert "aborted" not in ended(child)


@pytest.mark.process
def test_a_stream_that_is_cut_ends_with_an_error_event() -> None:
    with slow_server(drain=0.3) as (child, port):
        connection, response = begin_stream(port, max_tokens=90_000)
        child.send_signal(signal.SIGTERM)

        *_, last, done, _end = response.read().decode().split("\n\n")
        connection.close()

        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["code"], error["message"]) == (503, "The server is shutting down")
        assert done == "data: [DONE]"
        assert "requests still ran after 0.3 s and are aborted" in ended(child)


@pytest.mark.process
def test_a_request_that_is_never_sent_to_its_end_delays_the_stop_briefly() -> None:
    with slow_server(drain=30) as (child, port), socket.create_connection(("127.0.0.1", port)) as client:
        head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        client.sendall(f'{head}Content-Length: 100\r\n\r\n{{"prompt"'.encode())
        time.sleep(0.5)

        child.send_signal(signal.SIGTERM)

        ended(child)


@pytest.mark.process
def test_a_log_that_nobody_reads_stops_nothing() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"x" * 4096)
    with slow_server(stderr=writer) as (child, port):
        for _ in range(200):
            with socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECONDS) as client:
                client.sendall(b"nonsense\r\n\r\n")
                assert client.recv(100).startswith(b"HTTP/1.1 400 ")

        assert status_of(port, "GET", "/ready") == 200
        child.send_signal(signal.SIGTERM)

        assert child.wait(WAIT_SECONDS) == 0
    os.close(reader)
    os.close(writer)
