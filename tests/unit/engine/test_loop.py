from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Queue
from random import Random
from typing import Any

import pytest

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.engine.blocks import BlockPool
from aotgaudi.engine.constraints import ConstraintMaker
from aotgaudi.engine.core import EngineCore
from aotgaudi.engine.detokenizer import IncrementalDetokenizer
from aotgaudi.engine.loop import Engine
from aotgaudi.engine.output import ErrorEvent, Event, TokenEvent
from aotgaudi.engine.request import NewRequest
from aotgaudi.engine.sampling_params import SamplingParams, StructuredOutputs
from aotgaudi.engine.scheduler import Scheduler
from aotgaudi.engine.steps import DefragStep, Step, StepResult
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.errors import RequestError
from aotgaudi.spec.limits import ServingLimits

TIMEOUT_SECONDS = 60.0
LIMITS = ServingLimits(
    max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32, block_size=4, num_blocks=16
)
TABLE = BucketTable((PromptEntry(1, 16, 8),), (DecodeEntry(2, 1, 16),))
GREEDY = SamplingParams(temperature=0, max_tokens=3)


class GatedRunner:
    """Answers with "a"; while `gate` is shut it stays inside the step, and `is_inside` says so."""

    def __init__(self) -> None:
        self.gate, self.is_inside = threading.Event(), threading.Event()
        self.gate.set()
        self.noises: list[float] = []
        self.thread_names: set[str] = set()

    def run(self, step: Step) -> StepResult:
        self.is_inside.set()
        assert self.gate.wait(TIMEOUT_SECONDS)
        self.thread_names.add(threading.current_thread().name)
        self.noises += [row.sampling.noise for row in step.rows if row.sampling is not None]
        return StepResult([None if row.sampling is None else ord("a") for row in step.rows])

    def exchange(self, step: DefragStep) -> None:
        raise NotImplementedError

    def clear(self, blocks: Sequence[int]) -> None:
        raise NotImplementedError


class Owner:
    """Receives a request's events on the engine's thread."""

    def __init__(self) -> None:
        self._events: Queue[Event] = Queue()

    def on_event(self, event: Event) -> None:
        self._events.put(event)

    def __iter__(self) -> Iterator[Event]:
        while True:
            event = self._events.get(timeout=TIMEOUT_SECONDS)
            yield event
            if isinstance(event, ErrorEvent) or event.finish_reason is not None:
                assert self._events.empty()
                return

    def result(self) -> tuple[str, str]:
        """Returns the text and why it ended."""
        events = list(self)
        last = events[-1]
        text = "".join(event.text for event in events if isinstance(event, TokenEvent))
        return text, "error" if isinstance(last, ErrorEvent) else str(last.finish_reason)


def _new_detokenizer(new: NewRequest) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(lambda ids: "".join(map(chr, ids)), new.prompt_token_ids)


def _admitted(request_id: str, prompt: list[int], params: SamplingParams) -> NewRequest:
    return NewRequest(request_id, prompt, params, max_tokens=params.max_tokens or 29)


def _engine(runner: GatedRunner, table: BucketTable = TABLE, **options: Any) -> Engine:
    core = EngineCore(Scheduler(LIMITS, table, BlockPool(LIMITS.num_blocks)), runner)
    return Engine(core, _new_detokenizer, **options)


@pytest.fixture
def runner() -> GatedRunner:
    return GatedRunner()


@pytest.fixture
def make_engine(runner: GatedRunner) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(table: BucketTable = TABLE, **options: Any) -> Engine:
        engines.append(_engine(runner, table, **options))
        engines[-1].start()
        return engines[-1]

    yield make
    runner.gate.set()
    for engine in engines:
        assert engine.shutdown(TIMEOUT_SECONDS)


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine()


def _add(engine: Engine, request_id: str = "r", params: SamplingParams = GREEDY) -> Owner:
    owner = Owner()
    engine.add([_admitted(request_id, [1, 2, 3], params)], owner.on_event)
    return owner


def test_many_threads_are_served_by_one(engine: Engine, runner: GatedRunner) -> None:
    results: Queue[tuple[str, str]] = Queue()

    def ask(index: int) -> None:
        for round_ in range(5):
            results.put(_add(engine, f"{index}-{round_}").result())

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_SECONDS)

    assert [results.get_nowait() for _ in range(40)] == [("aaa", "length")] * 40
    assert runner.thread_names == {"aotgaudi-engine"}


def test_an_abort_ends_the_request_after_the_step_that_runs(engine: Engine, runner: GatedRunner) -> None:
    runner.gate.clear()
    owner = _add(engine, params=SamplingParams(max_tokens=20))
    assert runner.is_inside.wait(TIMEOUT_SECONDS)

    engine.abort("r")
    engine.abort("r")
    engine.abort("nobody")
    runner.gate.set()

    assert owner.result() == ("a", "abort")
    assert engine.drain(TIMEOUT_SECONDS)
    assert engine.stats().num_blocks_used == 0
    assert engine.stats().num_finished == {"abort": 1}


def test_a_request_that_is_aborted_before_it_is_seen_gets_its_last_event(
    engine: Engine, runner: GatedRunner
) -> None:
    runner.gate.clear()
    first = _add(engine, "first")
    assert runner.is_inside.wait(TIMEOUT_SECONDS)
    second = _add(engine, "second")
    assert engine.stats().num_waiting == 1

    engine.abort("second")
    runner.gate.set()

    assert second.result() == ("", "abort")
    assert first.result() == ("aaa", "length")


def test_an_id_may_be_used_again_once_its_request_has_ended(engine: Engine, runner: GatedRunner) -> None:
    _add(engine).result()
    _until(lambda: engine.stats().num_finished == {"length": 1}, engine)
    engine.abort("r")

    assert _add(engine).result() == ("aaa", "length")


def _until(condition: Callable[[], bool], engine: Engine) -> None:
    """Waits, on the engine's own condition, for what it publishes after a step."""
    with engine._wake:
        assert engine._wake.wait_for(condition, TIMEOUT_SECONDS)


def test_drain_refuses_new_requests_and_waits_for_the_others(engine: Engine, runner: GatedRunner) -> None:
    runner.gate.clear()
    owner = _add(engine)

    assert not engine.drain(0)
    with pytest.raises(RequestError, match="shutting down") as refusal:
        _add(engine, "late")
    assert refusal.value.http_status == 503
    runner.gate.set()

    assert engine.drain(TIMEOUT_SECONDS)
    assert owner.result() == ("aaa", "length")


def test_shutdown_aborts_what_is_left(engine: Engine, runner: GatedRunner) -> None:
    runner.gate.clear()
    running = _add(engine, "running", SamplingParams(max_tokens=20))
    assert runner.is_inside.wait(TIMEOUT_SECONDS)
    unseen = _add(engine, "unseen")
    assert not engine.shutdown(0)

    runner.gate.set()

    assert engine.shutdown(TIMEOUT_SECONDS)
    assert engine.shutdown(TIMEOUT_SECONDS)
    assert running.result() == ("a", "abort")
    assert unseen.result() == ("", "abort")
    assert engine.stats().num_blocks_used == 0
    with pytest.raises(RequestError):
        _add(engine, "late")


def test_an_engine_that_was_never_started_can_be_shut_down(runner: GatedRunner) -> None:
    engine = _engine(runner)
    owner = _add(engine)

    assert engine.shutdown()

    assert owner.result() == ("", "abort")


def test_an_engine_is_started_once(engine: Engine) -> None:
    with pytest.raises(RuntimeError):
        engine.start()


def test_a_bug_of_the_engine_is_told_to_everybody(
    make_engine: Callable[..., Engine], runner: GatedRunner
) -> None:
    class BrokenTable(BucketTable):
        def find_decode(self, batch_size: int, num_blocks: int) -> DecodeEntry | None:
            raise ZeroDivisionError("a bug")

    engine = make_engine(BrokenTable(TABLE.prompt, TABLE.decode))
    runner.gate.clear()
    owner, unseen = _add(engine), _add(engine, "unseen")
    runner.gate.set()

    assert [owner.result(), unseen.result()] == [("a", "error"), ("", "error")]
    assert engine.drain(TIMEOUT_SECONDS)
    assert isinstance(engine.failure, ZeroDivisionError)
    with pytest.raises(RequestError, match="has died") as refusal:
        _add(engine, "late")
    assert refusal.value.http_status == 503


def test_seeds_make_results_repeatable(make_engine: Callable[..., Engine], runner: GatedRunner) -> None:
    params = SamplingParams(seed=5, max_tokens=3)
    engine = make_engine()

    _add(engine, "one", params).result()
    _add(engine, "two", params).result()

    draws = Random(5)
    assert runner.noises == [draws.random() for _ in range(3)] * 2


def test_requests_without_a_seed_differ_and_follow_the_source_that_was_given(
    make_engine: Callable[..., Engine], runner: GatedRunner
) -> None:
    engine = make_engine(seeds=Random(1))

    _add(engine, "one").result()
    _add(engine, "two").result()

    seeds = Random(1)
    first, second = Random(seeds.getrandbits(64)), Random(seeds.getrandbits(64))
    assert runner.noises == [draws.random() for draws in [first] * 3 + [second] * 3]


def test_an_idle_engine_does_not_spin(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    step = engine._core.step

    def counted_step() -> bool:
        calls.append(True)
        return step()

    monkeypatch.setattr(engine._core, "step", counted_step)

    for request_id in "abcdef":
        _add(engine, request_id).result()
        _until(lambda: not engine._streams, engine)

    assert len(calls) == 6 * 3


def test_owners_are_flushed_once_a_step_after_its_events(engine: Engine) -> None:
    told: Queue[str] = Queue()

    def flush() -> None:
        told.put("flush")

    engine.add(
        [_admitted(name, [1, 2, 3], GREEDY) for name in "ab"],
        lambda event: told.put(event.request_id),
        flush=flush,
    )
    assert engine.drain(TIMEOUT_SECONDS)
    assert engine.shutdown(TIMEOUT_SECONDS)

    order = "".join(name[0] for name in iter(lambda: told.get() if not told.empty() else "", ""))
    assert order.count("a") == order.count("b") == 3
    assert "ff" not in order
    assert order.endswith("f")
    assert all(len(step) == len(set(step)) for step in order.split("f"))


def test_many_aborts_cost_little(make_engine: Callable[..., Engine], runner: GatedRunner) -> None:
    engine = make_engine()
    runner.gate.clear()
    owner = _add(engine, "first")
    assert runner.is_inside.wait(TIMEOUT_SECONDS)
    names = [f"many-{i}" for i in range(20_000)]
    engine.add([_admitted(name, [1], GREEDY) for name in names], lambda event: None)
    Random(0).shuffle(names)

    started = time.process_time()
    engine.abort(*names)
    runner.gate.set()

    assert owner.result() == ("aaa", "length")
    assert engine.drain(TIMEOUT_SECONDS)
    assert time.process_time() - started < 3


def test_shutdown_tells_everybody_soon_however_many_wait(
    make_engine: Callable[..., Engine], runner: GatedRunner
) -> None:
    engine = make_engine()
    events: list[Event] = []
    runner.gate.clear()
    engine.add([_admitted(str(i), [1], GREEDY) for i in range(20_000)], events.append)

    started = time.process_time()
    runner.gate.set()

    assert engine.shutdown(TIMEOUT_SECONDS)
    assert time.process_time() - started < 5
    last = [event for event in events if isinstance(event, ErrorEvent) or event.finish_reason is not None]
    assert len({event.request_id for event in last}) == len(last) == 20_000


def test_an_engine_with_work_that_ends_no_step_is_seen_to_stall(
    make_engine: Callable[..., Engine], runner: GatedRunner
) -> None:
    now = [100.0]
    engine = make_engine(clock=lambda: now[0])
    now[0] = 150.0
    assert engine.stalled_seconds == 0  # Idle.
    runner.gate.clear()
    owner = _add(engine)
    assert runner.is_inside.wait(TIMEOUT_SECONDS)
    now[0] = 160.0
    _add(engine, "waits")
    now[0] = 170.0

    assert engine.stalled_seconds == 20
    stats = engine.stats()
    assert (stats.stalled_seconds, stats.oldest_waiting_seconds) == (20, 10)

    runner.gate.set()
    assert owner.result() == ("aaa", "length")
    assert engine.drain(TIMEOUT_SECONDS)
    assert engine.stalled_seconds == 0
    assert engine.stats().oldest_waiting_seconds == 0


def test_whether_it_stalls_can_be_asked_while_the_engine_holds_its_lock(engine: Engine) -> None:
    answers: Queue[float] = Queue()
    with engine._wake:
        threading.Thread(target=lambda: answers.put(engine.stalled_seconds), daemon=True).start()

        assert answers.get(timeout=TIMEOUT_SECONDS) == 0


# Grammars

STRUCTURED = SamplingParams(temperature=0, max_tokens=3, structured_outputs=StructuredOutputs(regex="a+"))


class AllowsAll:
    """A matcher that allows everything."""

    def advance(self, token_ids: Sequence[int]) -> None:
        pass

    def mask(self) -> bytes:
        return b"\xff" * 32


class GatedGrammars:
    """Compiles when `gate` is open; `error` is what then comes of it."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.gate, self.is_inside, self.error = threading.Event(), threading.Event(), error
        self.thread_name = ""

    def compile(self, outputs: StructuredOutputs) -> AllowsAll:
        self.thread_name = threading.current_thread().name
        self.is_inside.set()
        assert self.gate.wait(TIMEOUT_SECONDS)
        if self.error is not None:
            raise self.error
        return AllowsAll()


@contextmanager
def engine_with(grammars: GatedGrammars) -> Iterator[Engine]:
    constraints = ConstraintMaker(256, {0}, lambda text: [ord(letter) for letter in text], grammars)
    engine = _engine(GatedRunner(), constraints=constraints)
    engine.start()
    try:
        yield engine
    finally:
        grammars.gate.set()
        assert engine.shutdown(TIMEOUT_SECONDS)


def test_others_run_while_a_grammar_is_compiled() -> None:
    grammars, slow, quick = GatedGrammars(), Owner(), Owner()

    with engine_with(grammars) as engine:
        engine.add([_admitted("slow", [1], STRUCTURED)], slow.on_event)
        engine.add([_admitted("quick", [1], GREEDY)], quick.on_event)
        assert quick.result() == ("aaa", "length")
        assert engine.stats().num_waiting == 1
        grammars.gate.set()

        assert slow.result() == ("aaa", "length")

    assert grammars.thread_name.startswith("aotgaudi-grammars")


@pytest.mark.parametrize(
    "error", [RequestError("bad", param="structured_outputs"), KeyboardInterrupt("panic")]
)
def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(error: BaseException) -> None:
    grammars, owner, other = GatedGrammars(error), Owner(), Owner()
    grammars.gate.set()

    with engine_with(grammars) as engine:
        engine.add([_admitted("bad", [1], STRUCTURED)], owner.on_event)
        (event,) = owner
        engine.add([_admitted("good", [1], GREEDY)], other.on_event)

        assert other.result() == ("aaa", "length")
        assert engine.drain(TIMEOUT_SECONDS)

    assert isinstance(event, ErrorEvent)
    assert str(error) in str(event.error)


def test_a_request_is_aborted_while_its_grammar_is_compiled() -> None:
    grammars, owner = GatedGrammars(), Owner()

    with engine_with(grammars) as engine:
        engine.add([_admitted("slow", [1], STRUCTURED)], owner.on_event)
        assert grammars.is_inside.wait(TIMEOUT_SECONDS)
        engine.abort("slow")

        assert owner.result() == ("", "abort")
        assert engine.drain(TIMEOUT_SECONDS)


def test_a_shutdown_aborts_what_is_compiled() -> None:
    grammars, owner = GatedGrammars(), Owner()

    with engine_with(grammars) as engine:
        engine.add([_admitted("slow", [1], STRUCTURED)], owner.on_event)
        assert grammars.is_inside.wait(TIMEOUT_SECONDS)
        assert engine.shutdown(TIMEOUT_SECONDS)

    assert owner.result() == ("", "abort")
