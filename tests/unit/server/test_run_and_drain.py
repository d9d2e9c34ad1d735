"""A real socket: OpenAI's own client, clients that hang up, a port in use, signals."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.engine.admission import RequestRules
from aotgaudi.engine.blocks import BlockPool
from aotgaudi.engine.core import EngineCore
from aotgaudi.engine.detokenizer import IncrementalDetokenizer
from aotgaudi.engine.scheduler import Scheduler
from aotgaudi.engine.steps import DefragStep, Step, StepResult
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.errors import SpecError
from aotgaudi.llm.tokenizer import Tokenizer
from aotgaudi.server.app import create_app
from aotgaudi.server.listener import bind
from aotgaudi.server.options import StopTimes
from aotgaudi.server.run_and_drain import HttpServer
from aotgaudi.server.service import Service
from aotgaudi.spec.limits import ServingLimits
from tests.unit.server.slow_server import EngineOnThread

WAIT_SECONDS = 10


@pytest.fixture
def serve() -> Iterator[Callable[[Service], int]]:
    """Serves a service on a thread, and returns the port."""
    running: list[tuple[HttpServer, threading.Thread]] = []

    def start(service: Service) -> int:
        ports: queue.Queue[int] = queue.Queue()
        server = HttpServer(
            create_app(service),
            bind("127.0.0.1", 0),
            service,
            on_listening=lambda url: ports.put(int(url.rpartition(":")[2])),
            stop_times=StopTimes(drain=1),
        )
        thread = threading.Thread(target=server.run_until_stopped, daemon=True)
        thread.start()
        running.append((server, thread))
        return ports.get(timeout=WAIT_SECONDS)

    yield start
    for server, thread in running:
        server.stop()
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()


Serve = Callable[[Service], int]


def _openai(port: int) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)


def test_openai_client_completes(serve: Serve, service: Service) -> None:
    with _openai(serve(service)) as client:
        whole = client.completions.create(model="tiny", prompt="hi", max_tokens=5, temperature=0)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.completions.create(model="tiny", prompt="hi", **options))

    assert whole.choices[0].text == "Hello"
    assert whole.choices[0].finish_reason == "stop"
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "Hello"
    assert chunks[-1].usage == whole.usage


def test_openai_client_chats(serve: Serve, service: Service) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with _openai(serve(service)) as client:
        whole = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=5)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.chat.completions.create(model="tiny", messages=messages, **options))
        models = [model.id for model in client.models.list()]

    assert whole.choices[0].message.content == "Hello"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello"
    assert chunks[-1].usage == whole.usage
    assert models == ["tiny", "org/tiny"]


def test_openai_client_understands_errors(serve: Serve, service: Service, engine, scripts) -> None:
    with _openai(serve(service)) as client:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(model="other", prompt="hi")
        with pytest.raises(openai.BadRequestError, match="max_model_len = 64") as caught:
            client.completions.create(model="tiny", prompt="a" * 100)
        assert caught.value.param == "prompt"
        engine.script = scripts["broken"]
        with pytest.raises(openai.APIError, match="had an error"):
            list(client.completions.create(model="tiny", prompt="hi", stream=True))


@pytest.mark.parametrize("is_stream", [True, False])
def test_hanging_up_aborts(serve: Serve, service: Service, engine, scripts, is_stream: bool) -> None:
    added = threading.Event()

    def script(request_id: str):
        added.set()
        return scripts["hold"](request_id)

    engine.script = script
    connection = http.client.HTTPConnection("127.0.0.1", serve(service), timeout=WAIT_SECONDS)
    body = json.dumps({"prompt": "a", "stream": is_stream})

    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    assert added.wait(WAIT_SECONDS)
    if is_stream:
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        response.close()
    connection.close()

    assert engine.aborted.get(timeout=WAIT_SECONDS) == engine.added[0].request_id


class _Runner:
    """Answers with "a"."""

    def run(self, step: Step) -> StepResult:
        return StepResult([None if row.sampling is None else 64 for row in step.rows])

    def exchange(self, step: DefragStep) -> None:
        raise NotImplementedError

    def clear(self, blocks: Sequence[int]) -> None:
        raise NotImplementedError


def test_real_engine_serves(serve: Serve, make_service: Callable[..., Service], backend) -> None:
    limits = ServingLimits(
        max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64, block_size=4, num_blocks=32
    )
    table = BucketTable((PromptEntry(1, 64, 16),), (DecodeEntry(2, 1, 32),))
    decode = Tokenizer(backend).decode
    real = EngineOnThread(
        EngineCore(Scheduler(limits, table, BlockPool(limits.num_blocks)), _Runner()),
        RequestRules(limits, vocab_size=258),
        lambda new: IncrementalDetokenizer(decode, new.prompt_token_ids),
    )
    real.start()
    letter = decode([64])

    with _openai(serve(make_service(engine=real))) as client:
        whole = client.completions.create(model="tiny", prompt=["x", "y", "z"], max_tokens=4)
        stopped = client.completions.create(model="tiny", prompt="x", max_tokens=9, stop=[letter * 3])
        with pytest.raises(openai.BadRequestError, match="max_model_len = 64"):
            client.completions.create(model="tiny", prompt="x" * 64)
        with pytest.raises(openai.BadRequestError, match="vocabulary"):
            client.completions.create(model="tiny", prompt=[258])

    assert [choice.text for choice in whole.choices] == [letter * 4] * 3
    assert {choice.finish_reason for choice in whole.choices} == {"length"}
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (6, 12)
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")
    assert real.stats().num_blocks_used == 0


@pytest.mark.parametrize("dead", ["engine", "preprocessor"])
def test_a_server_without_engine_or_preprocessor_ends_by_itself(service: Service, dead: str) -> None:
    listening = threading.Event()
    server = HttpServer(
        create_app(service),
        bind("127.0.0.1", 0),
        service,
        on_listening=lambda *_: listening.set(),
        stop_times=StopTimes(delay=60, drain=60),
    )
    thread = threading.Thread(target=server.run_until_stopped, daemon=True)
    thread.start()
    assert listening.wait(WAIT_SECONDS)
    assert thread.is_alive()

    getattr(service, dead).failure = RuntimeError("gone")

    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


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


@pytest.mark.process
def test_after_sigterm_the_socket_stays_open_and_answers_503_for_the_delay() -> None:
    with slow_server(delay=1.0) as (child, port):
        assert status_of(port, "GET", "/ready") == 200

        started = time.monotonic()
        child.send_signal(signal.SIGTERM)
        time.sleep(0.3)

        assert status_of(port, "GET", "/ready") == 503
        assert status_of(port, "POST", "/v1/completions", json.dumps({"prompt": "a"})) == 503
        assert status_of(port, "GET", "/health") == 200
        ended(child)
        assert time.monotonic() - started >= 1.0


@pytest.mark.process
@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]])
def test_sigint_and_a_second_sigterm_do_without_the_delay(signals: list[signal.Signals]) -> None:
    with slow_server(delay=60) as (child, _):
        for sig in signals:
            child.send_signal(sig)
            time.sleep(0.2)

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
