"""The API server's end and the engine's, with a socket between them: a real engine, a runner that says "a"."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.engine.admission import RequestRules
from aotgaudi.engine.blocks import BlockPool
from aotgaudi.engine.core import EngineCore
from aotgaudi.engine.detokenizer import IncrementalDetokenizer
from aotgaudi.engine.limits import AdmissionLimits
from aotgaudi.engine.loop import Engine
from aotgaudi.engine.output import ErrorEvent, Event, TokenEvent
from aotgaudi.engine.request import NewRequest
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.engine.scheduler import Scheduler
from aotgaudi.engine.steps import DefragStep, Step, StepResult, TokenLogprobs
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.errors import AotGaudiError, RequestError
from aotgaudi.llm.running import Warmth
from aotgaudi.server.engine.channel import Channel, Running, Status
from aotgaudi.server.engine.client import EngineClient
from aotgaudi.server.engine.worker import Reporter, obey
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.sampler import SamplerSetting, SamplerSpec

SECONDS = 60.0
LIMITS = ServingLimits(
    max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32, block_size=4, num_blocks=16
)
TABLE = BucketTable((PromptEntry(1, 16, 8),), (DecodeEntry(2, 1, 16),))
SAMPLER = SamplerSpec(settings=(SamplerSetting(temperature=0, top_p=1, top_k=0, num_logprobs=2),))
RULES = RequestRules(LIMITS, vocab_size=256, sampler=SAMPLER)
GREEDY = SamplingParams(temperature=0, max_tokens=3)
ENDED = AotGaudiError("the engine's process has ended (SIGKILL)")


class GatedRunner:
    """Answers with "a", and with its log-probability where one is asked for. While `gate` is shut it stays in the step."""

    def __init__(self) -> None:
        self.gate, self.is_inside = threading.Event(), threading.Event()
        self.gate.set()
        self.fault: Exception | None = None

    def run(self, step: Step) -> StepResult:
        self.is_inside.set()
        assert self.gate.wait(SECONDS)
        if self.fault is not None:
            raise self.fault
        asked = {index: row.sampling for index, row in enumerate(step.rows) if row.sampling is not None}
        likely = TokenLogprobs(-0.5, ((ord("a"), -0.5), (ord("b"), -1.5)))
        logprobs = {index: likely for index, row in asked.items() if row.params.logprobs is not None}
        return StepResult([ord("a") if index in asked else None for index in range(len(step.rows))], logprobs)

    def exchange(self, step: DefragStep) -> None:
        raise NotImplementedError

    def clear(self, blocks: Sequence[int]) -> None:
        raise NotImplementedError


class Both:
    """The two ends. `client` is on the event loop; the engine's end has its own threads, as it has in its process."""

    def __init__(self, limits: AdmissionLimits) -> None:
        ours, theirs = socket.socketpair()
        self.runner, self.steps = GatedRunner(), list[tuple[str, float]]()
        self._channel = Channel(theirs)
        self.reporter = Reporter(self._channel, chr)
        core = EngineCore(
            Scheduler(LIMITS, TABLE, BlockPool(LIMITS.num_blocks)), self.runner, on_step=self.reporter.on_step
        )
        self.engine = Engine(core, _new_detokenizer)
        self.engine.start()
        model: Any = SimpleNamespace(engine=self.engine, warmth=lambda: Warmth(3, 3, {}))
        threading.Thread(target=obey, args=(self._channel, model, self.reporter), daemon=True).start()
        running = Running(
            rules=RULES,
            defaults={},
            manifest_id="",
            binding="",
            status=Status(self.engine.stats(), Warmth(1, 3, {})),
            phases=(),
        )
        process: Any = SimpleNamespace(connection=ours, ended=lambda: ENDED)
        self.client = EngineClient(process, running, limits, lambda *step: self.steps.append(step))

    def end(self) -> None:
        """As the process ends, or is killed: whatever runs, the kernel closes its connection."""
        self._channel.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.runner.gate.set()
        assert self.engine.shutdown(SECONDS)
        self.end()


def _new_detokenizer(new: NewRequest) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(lambda ids: "".join(map(chr, ids)), new.prompt_token_ids)


def with_both(
    limits: AdmissionLimits = AdmissionLimits(),  # noqa: B008 - a frozen value
) -> Callable[[Callable[[Both], Awaitable[None]]], Callable[[], None]]:
    """Runs a test on an event loop, with both ends attached."""

    def decorated(test: Callable[[Both], Awaitable[None]]) -> Callable[[], None]:
        async def attached() -> None:
            ends = Both(limits)
            try:
                ends.client.attach()
                await test(ends)
            finally:
                ends.close()
                await asyncio.sleep(0)

        def run() -> None:
            asyncio.run(attached())

        run.__name__, run.__module__ = test.__name__, test.__module__
        return run

    return decorated


class Owner:
    """Of one request, on the event loop."""

    def __init__(self) -> None:
        self.events = asyncio.Queue[Event]()

    async def all(self) -> list[Event]:
        found: list[Event] = []
        while True:
            event = await asyncio.wait_for(self.events.get(), SECONDS)
            found.append(event)
            if isinstance(event, ErrorEvent) or event.finish_reason is not None:
                assert self.events.empty()
                return found


def add(ends: Both, *names: str, params: SamplingParams = GREEDY) -> Owner:
    owner, requests = Owner(), [NewRequest(name, [1, 2, 3], params) for name in names]
    ends.client.add(requests, owner.events.put_nowait)
    return owner


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


async def inside(ends: Both) -> None:
    await until(ends.runner.is_inside.is_set)


@with_both()
async def test_tokens_come_and_steps_are_told_of(ends: Both) -> None:
    owner = add(ends, "r")
    events = await owner.all()

    assert "".join(event.text for event in events if isinstance(event, TokenEvent)) == "aaa"
    await until(lambda: [kind for kind, _ in ends.steps] == ["prompt", "decode", "decode"])
    assert ends.client.drain()


@with_both()
async def test_what_can_never_run_is_refused_here_and_leaves_nothing_behind(ends: Both) -> None:
    with pytest.raises(RequestError, match="max_model_len"):
        add(ends, "r", params=SamplingParams(temperature=0, max_tokens=99))
    with pytest.raises(RequestError, match="integers below the vocabulary's size 256"):
        ends.client.add([NewRequest("r", [256], GREEDY)], print)

    assert not ends.runner.is_inside.is_set()
    assert len(await add(ends, "r").all()) == 3


@with_both(AdmissionLimits(max_requests=1))
async def test_room_is_counted_here_and_given_back_when_a_request_has_ended(ends: Both) -> None:
    ends.runner.gate.clear()
    first = add(ends, "a")
    await inside(ends)
    with pytest.raises(RequestError, match="the server is full") as refused:
        add(ends, "b")
    assert refused.value.http_status == 429
    assert ends.client.stats().num_refused["server_requests"] == 1

    ends.runner.gate.set()
    await first.all()
    assert len(await add(ends, "b").all()) == 3


@with_both()
async def test_an_abort_ends_a_request_after_the_step_that_runs(ends: Both) -> None:
    ends.runner.gate.clear()
    owner = add(ends, "r", params=SamplingParams(temperature=0, max_tokens=20))
    await inside(ends)
    ends.client.abort("r", "nobody")
    await until(lambda: bool(ends.engine._aborts))
    ends.runner.gate.set()

    *_, last = await owner.all()
    assert isinstance(last, TokenEvent)
    assert last.finish_reason == "abort"


@with_both()
async def test_a_snapshot_is_brought_up_to_date_also_while_a_step_runs(ends: Both) -> None:
    assert ends.client.warmth().num_warm == 1
    ends.runner.gate.clear()
    add(ends, "a")
    await inside(ends)
    add(ends, "b")

    await until(lambda: ends.engine.stats().num_waiting == 1)
    await asyncio.gather(ends.client.refresh(), ends.client.refresh())

    assert ends.client.warmth().num_warm == 3
    assert ends.client.stats().num_waiting == 1
    assert ends.client.stalled_seconds > 0


@with_both()
async def test_the_texts_of_tokens_come_with_their_log_probabilities(ends: Both) -> None:
    await add(ends, "plain").all()
    with pytest.raises(KeyError):
        ends.client.token_text(ord("a"))

    await add(ends, "r", params=SamplingParams(temperature=0, max_tokens=1, logprobs=2)).all()

    assert [ends.client.token_text(ord(text)) for text in "ab"] == ["a", "b"]


@with_both()
async def test_a_step_that_fails_fails_its_request_and_the_engine_goes_on(ends: Both) -> None:
    ends.runner.fault = OSError(5, "the card fell out")
    (event,) = await add(ends, "r").all()

    assert isinstance(event, ErrorEvent)
    assert "the card fell out" in str(event.error)
    ends.runner.fault = None
    assert len(await add(ends, "r").all()) == 3
    assert ends.client.failure is None


@with_both()
async def test_a_process_that_ends_fails_what_is_open_and_lets_nothing_in(ends: Both) -> None:
    ends.runner.gate.clear()
    owner = add(ends, "r", "s")
    await inside(ends)
    ends.end()

    events = [await asyncio.wait_for(owner.events.get(), SECONDS) for _ in range(2)]
    assert {event.request_id for event in events} == {"r", "s"}
    for event in events:
        assert isinstance(event, ErrorEvent)
        assert isinstance(event.error, RequestError)
        assert event.error.http_status == 503
    assert ends.client.failure is ENDED
    with pytest.raises(RequestError, match="the engine has died") as refused:
        add(ends, "t")
    assert refused.value.http_status == 503
    await ends.client.refresh()
    assert ends.client.stalled_seconds == 0
    assert ends.client.shutdown()


@with_both()
async def test_to_stop_is_to_abort_what_runs_and_to_wait_for_the_end(ends: Both) -> None:
    ends.runner.gate.clear()
    owner = add(ends, "r", params=SamplingParams(temperature=0, max_tokens=20))
    await inside(ends)
    assert not ends.client.drain()
    assert not ends.client.shutdown()
    assert not ends.client.shutdown()
    await until(lambda: ends.engine._is_stopping)
    ends.runner.gate.set()

    *_, last = await owner.all()
    assert isinstance(last, TokenEvent)
    assert last.finish_reason == "abort"
    ends.engine.join()
    ends.end()
    await until(ends.client.shutdown)
    assert ends.client.failure is None


@with_both()
async def test_what_is_said_before_the_connection_is_there_is_said_then(ends: Both) -> None:
    early = add(ends, "r")  # No turn of the event loop has passed.

    assert len(await early.all()) == 3
