"""A fake engine on a thread, a byte-level tokenizer without training, a service of both, and helpers that ask it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import tokenizers
from starlette.testclient import TestClient

from aotgaudi.engine.admission import Admission, RequestRules, check_sampling
from aotgaudi.engine.limits import AdmissionLimits
from aotgaudi.engine.output import ErrorEvent, Event, OnEvent, TokenEvent
from aotgaudi.engine.request import NewRequest
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.engine.stats import EngineStats
from aotgaudi.errors import RequestError
from aotgaudi.llm.chat import ChatTemplate
from aotgaudi.llm.running import Warmth
from aotgaudi.llm.tokenizer import Tokenizer
from aotgaudi.runtime.guard import CAUSES
from aotgaudi.server.app import create_app
from aotgaudi.server.options import ReplyParsers, StopTimes
from aotgaudi.server.preprocess.prepare import (
    Kind,
    PreparedRequest,
    Preparer,
    ServedModel,
    Tokenized,
    TokenizeKind,
    answer_of_bytes,
    answer_to_bytes,
)
from aotgaudi.server.run_and_drain import HttpServer, bind
from aotgaudi.server.service import Service
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.sampler import SamplerSpec
from tests.unit.llm.conftest import BOS, make_backend, make_grammars

WAIT_SECONDS = 25
MAX_MODEL_LEN = 64
RULES = RequestRules(
    ServingLimits(
        max_num_seqs=2,
        max_num_batched_tokens=MAX_MODEL_LEN,
        max_model_len=MAX_MODEL_LEN,
        block_size=4,
        num_blocks=32,
    ),
    vocab_size=100_000,
)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
Script = Callable[[str], Sequence[Event]]
HOLD = "hold"


@dataclass
class Added:
    """What the engine was asked for."""

    token_ids: tuple[int, ...]
    params: SamplingParams
    request_id: str
    on_event: Callable[[Event], object]


def token(request_id: str, text: str = "", *token_ids: int, **fields: Any) -> TokenEvent:
    return TokenEvent(request_id=request_id, text=text, token_ids=token_ids, **fields)


def answer(request_id: str) -> Sequence[Event]:
    """Three pieces, one of them without text."""
    return (
        token(request_id, "Hel", 1),
        token(request_id, "", 2),
        token(request_id, "lo", 3, finish_reason="stop"),
    )


@dataclass
class FakeEngine:
    """Plays `script` for every request, on its own thread. A script without an end waits for an abort."""

    script: Script = answer
    failure: Exception | None = None
    stalled_seconds: float = 0.0
    added: list[Added] = field(default_factory=list)
    aborted: queue.Queue[str] = field(default_factory=queue.Queue)
    calls: list[str] = field(default_factory=list)
    refusal: RequestError | None = None
    sampler: SamplerSpec = field(default_factory=SamplerSpec)
    admission: Admission = field(default_factory=lambda: Admission(RULES, AdmissionLimits()))
    token_text: Callable[[int], str] = str

    def __post_init__(self) -> None:
        self._work: queue.Queue[Added | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, requests: Sequence[NewRequest], on_event: OnEvent) -> None:
        if self.refusal is not None:
            raise self.refusal
        for new in requests:
            self._check(new.prompt_token_ids, new.params)
        loop = asyncio.get_running_loop()

        def wake(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # The loop is closed: the client has gone.
                loop.call_soon_threadsafe(on_event, event)

        for new in requests:
            self.added.append(Added(tuple(new.prompt_token_ids), new.params, new.request_id, wake))
            self._work.put(self.added[-1])

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        check_sampling(params, self.sampler)
        if not prompt:
            raise RequestError("the prompt is empty: at least 1 token is needed", param="prompt")
        if len(prompt) >= MAX_MODEL_LEN:
            raise RequestError(f"the prompt is longer than max_model_len = {MAX_MODEL_LEN}", param="prompt")
        if params.max_tokens is not None and len(prompt) + params.max_tokens > MAX_MODEL_LEN:
            raise RequestError(f"max_model_len = {MAX_MODEL_LEN}", param="max_tokens")

    def abort(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self.aborted.put(request_id)

    async def refresh(self) -> None:
        self.calls.append("refresh")

    def drain(self) -> bool:
        self.calls.append("drain")
        return True

    def shutdown(self, timeout_seconds: float = 0) -> bool:
        self.calls.append("shutdown")
        self._work.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=2,
            num_waiting=3,
            num_blocks_used=5,
            num_blocks_free=7,
            num_failed_steps=0,
            num_prefill_tokens=0,
            num_output_tokens=0,
            num_preemptions=11,
            num_defrag_swaps=13,
            num_finished={},
            num_invalid_logits=19,
            num_refused={"server_requests": 17},
            oldest_waiting_seconds=1.5,
            stalled_seconds=self.stalled_seconds,
        )

    def _run(self) -> None:
        while (request := self._work.get()) is not None:
            for event in self.script(request.request_id):
                request.on_event(event)


def prepared(*prompts: Sequence[int]) -> PreparedRequest:
    """A prepared request for a completion of each prompt."""
    return PreparedRequest(
        model="m", prompts=prompts, params=SamplingParams(), stream=True, stream_usage="none", own_names={}
    )


def make_preparer(
    template: str | None = TEMPLATE,
    max_len: int = MAX_MODEL_LEN,
    backend: tokenizers.Tokenizer | None = None,
    **options: Any,
) -> Preparer:
    tokenizer = Tokenizer(backend or make_backend(), [257])
    chat_template = None if template is None else ChatTemplate(template, {"bos_token": BOS})
    model = ServedModel(**{"names": ("tiny", "org/tiny"), "max_len": max_len, "defaults": {}, **options})
    return Preparer(tokenizer, chat_template, make_grammars(), model)


@dataclass
class DirectPreprocessor:
    """Prepares requests where it is called, and sends them over the wire's encoding to itself."""

    preparer: Preparer
    failure: Exception | None = None
    is_stuck: bool = False

    async def prepare(self, kind: Kind, raw: bytes) -> PreparedRequest:
        return answer_of_bytes(PreparedRequest, answer_to_bytes(self.preparer.prepare(kind, raw)))

    async def tokenize(self, kind: TokenizeKind, raw: bytes) -> Tokenized:
        return answer_of_bytes(Tokenized, answer_to_bytes(self.preparer.prepare(kind, raw)))


def first_piece_only(request_id: str) -> Sequence[Event]:
    return (token(request_id, "Hel", 1),)


def broken_after_first_piece(request_id: str) -> Sequence[Event]:
    error = RuntimeError("secret detail")
    return (*first_piece_only(request_id), ErrorEvent(request_id=request_id, error=error))


def aborted_by_shutdown(request_id: str) -> Sequence[Event]:
    return (token(request_id, finish_reason="abort"),)


@pytest.fixture
def scripts() -> dict[str, Script]:
    """What an engine may play, by name."""
    return {
        "answer": answer,
        HOLD: first_piece_only,
        "broken": broken_after_first_piece,
        "shutdown": aborted_by_shutdown,
    }


@pytest.fixture(scope="session")
def backend() -> tokenizers.Tokenizer:
    """One token a byte; BOS is 256, EOS is 257."""
    return make_backend()


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.shutdown(5)


@pytest.fixture
def make_service(engine: FakeEngine, backend: tokenizers.Tokenizer) -> Callable[..., Service]:
    """Makes a service of the fake engine; keywords override its fields."""

    def make(
        template: str | None = TEMPLATE,
        max_model_len: int = MAX_MODEL_LEN,
        defaults: Mapping[str, object] = MappingProxyType({}),
        parsers: ReplyParsers = ReplyParsers(),  # noqa: B008 - a frozen value
        root: str = "",
        **overrides: object,
    ) -> Service:
        options = {"defaults": defaults, "parsers": parsers, "root": root}
        preparer = make_preparer(template, max_model_len, backend, **options)
        engine.token_text = preparer.tokenizer.token_text
        fields: dict[str, object] = {
            "engine": engine,
            "preprocessor": DirectPreprocessor(preparer),
            "model": preparer.model,
            "manifest_id": "0123456789abcdef",
            "warmth": lambda: Warmth(4, 4, dict.fromkeys(CAUSES, 0), ("seccomp", "hook")),
            "version": "9.9.9",
        }
        return Service(**{**fields, **overrides})  # type: ignore[arg-type]

    return make


@pytest.fixture
def service(make_service: Callable[..., Service]) -> Service:
    return make_service()


@pytest.fixture
def client(service: Service) -> TestClient:
    """A client of the application, without its life: nothing is closed at the end."""
    return TestClient(create_app(service))


def events_of(stream: str) -> list[dict[str, Any]]:
    """The events of a stream, which must end with [DONE]."""
    blocks = stream.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: ") for block in blocks[:-2])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def assert_refused(
    client: TestClient, path: str, body: object, param: str | None, fragment: str = ""
) -> None:
    """Asserts that `body` (bytes are JSON) gets a 400 in OpenAI's form that names `param`."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = client.post(path, content=raw, headers={"Content-Type": "application/json"})

    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] in ("Bad Request", "BadRequestError")
    assert (error["code"], error["param"]) == (400, param)
    assert fragment in error["message"]


@dataclass
class Running:
    """A server that runs on a thread."""

    url: str
    server: HttpServer
    thread: threading.Thread


@contextlib.contextmanager
def serving(
    service: Service,
    listener: socket.socket | None = None,
    *,
    stop_times: StopTimes = StopTimes(delay=0, drain=1, flush=0.5),  # noqa: B008 - a frozen value
    app: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Iterator[Running]:
    """Serves over a socket. `app` has arguments of `create_app`, `options` further ones of `HttpServer`."""
    urls: queue.Queue[str] = queue.Queue()
    server = HttpServer(
        create_app(service, **app),
        listener or bind("127.0.0.1", 0),
        service,
        on_listening=urls.put,
        stop_times=stop_times,
        **options,
    )
    thread = threading.Thread(target=server.run_until_stopped, daemon=True)
    thread.start()
    try:
        yield Running(urls.get(timeout=WAIT_SECONDS), server, thread)
    finally:
        server.stop()
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
