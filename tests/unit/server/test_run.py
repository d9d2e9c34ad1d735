"""A real socket: OpenAI's own client, clients that hang up, a port in use, signals."""

from __future__ import annotations

import http.client
import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import openai
import pytest

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.engine.admission import Admission
from aotgaudi.engine.blocks import BlockPool
from aotgaudi.engine.core import EngineCore
from aotgaudi.engine.detokenizer import IncrementalDetokenizer
from aotgaudi.engine.loop import Engine
from aotgaudi.engine.scheduler import Scheduler
from aotgaudi.engine.steps import DefragStep, Step, StepResult
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.errors import SpecError
from aotgaudi.server.app import create_app
from aotgaudi.server.run import HttpServer, bind, serve_forever
from aotgaudi.server.service import Service
from aotgaudi.server.tokenizer import Tokenizer
from aotgaudi.spec.limits import ServingLimits

WAIT_SECONDS = 10


@pytest.fixture
def serve() -> Iterator[Callable[[Service], int]]:
    """Serves a service on a thread, and returns the port."""
    running: list[tuple[HttpServer, threading.Thread]] = []

    def start(service: Service) -> int:
        ports: queue.Queue[int] = queue.Queue()
        server = HttpServer(
            create_app(service, drain_timeout_seconds=1),
            bind("127.0.0.1", 0),
            on_listening=lambda _host, port: ports.put(port),
            on_stop=service.begin_drain,
            drain_timeout_seconds=1,
        )
        thread = threading.Thread(target=server.run, daemon=True)
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


def test_real_engine_serves(serve: Serve, make_service: Callable[..., Service], backend) -> None:
    limits = ServingLimits(
        max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64, block_size=4, num_blocks=32
    )
    table = BucketTable((PromptEntry(1, 64, 16),), (DecodeEntry(2, 1, 32),))
    decode = Tokenizer(backend).decode
    real = Engine(
        EngineCore(Scheduler(limits, table, BlockPool(limits.num_blocks)), _Runner()),
        Admission(limits, vocab_size=258),
        lambda ids: IncrementalDetokenizer(decode, ids),
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


def test_port_in_use_is_a_spec_error() -> None:
    with bind("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]

        with pytest.raises(SpecError, match=rf"127\.0\.0\.1:{port}: cannot be listened on") as caught:
            serve_forever(_unused_app, "127.0.0.1", port, lambda _host, _port: None)

    assert caught.value.exit_code == 2


def test_port_that_is_taken_after_binding_is_a_spec_error() -> None:
    with bind("127.0.0.1", 0) as mine:
        host, port = mine.getsockname()
        with bind(host, port) as other:
            other.listen()

            with pytest.raises(SpecError, match="cannot be listened on"):
                serve_forever(_unused_app, host, port, lambda _host, _port: None, listener=mine)


async def _unused_app(scope: object, receive: object, send: object) -> None:
    raise AssertionError


@pytest.mark.parametrize(("host", "port"), [("no.such.host.invalid", 0), ("127.0.0.1", 70_000)])
def test_bad_address_is_a_spec_error(host: str, port: int) -> None:
    with pytest.raises(SpecError, match=host):
        bind(host, port)


_CHILD = """
from aotgaudi.server.run import serve_forever

async def app(scope, receive, send):
    while scope["type"] == "lifespan":
        kind = (await receive())["type"]
        await send({"type": kind + ".complete"})
        if kind == "lifespan.shutdown":
            print("closed", flush=True)
            return

serve_forever(
    app, "127.0.0.1", 0, lambda host, port: print("listening", flush=True),
    on_stop=lambda: print("stopping", flush=True),
)
"""


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_server_gracefully_with_exit_code_0(sig: signal.Signals) -> None:
    child = subprocess.Popen([sys.executable, "-c", _CHILD], stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "listening\n"

        child.send_signal(sig)

        assert child.stdout.read() == "stopping\nclosed\n"
        assert child.wait(WAIT_SECONDS) == 0
