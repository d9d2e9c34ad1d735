from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.engine.blocks import BlockPool
from aotgaudi.engine.core import EngineCore
from aotgaudi.engine.detokenizer import IncrementalDetokenizer
from aotgaudi.engine.output import ErrorEvent, Event, OutputStream, TokenEvent, Usage
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.engine.scheduler import Scheduler
from aotgaudi.engine.stats import EngineStats
from aotgaudi.engine.steps import DefragStep, Step, StepResult, StepWork, TokenLogprobs
from aotgaudi.entries import DecodeEntry, DefragEntry, Entry, PromptEntry
from aotgaudi.errors import CoverageError, RequestError
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.scheduler import DefragSpec
from tests.driving import request_of

LIMITS = ServingLimits(
    max_num_seqs=4,
    max_num_prefill_seqs=2,
    max_num_batched_tokens=16,
    max_model_len=32,
    block_size=4,
    num_blocks=16,
)
PROMPT, DECODE = PromptEntry(2, 16, 8), DecodeEntry(4, 1, 16)
TABLE = BucketTable((PROMPT,), (DECODE,))
EOS = ord("$")


class ScriptedRunner:
    """Answers row r of the n-th step with `text[n]`, or as `fail` says."""

    def __init__(self, text: str = "abcdefghijklmnop") -> None:
        self._text = iter(text)
        self.fail: Callable[[Step | DefragStep], None] = lambda step: None
        self.exchanged: list[DefragStep] = []
        self.cleared: list[int] = []
        self.logprobs: dict[int, TokenLogprobs] = {}
        self.invalid_rows: set[int] = set()

    def run(self, step: Step) -> StepResult:
        self.fail(step)
        token_id = ord(next(self._text))
        tokens = [None if row.sampling is None else token_id for row in step.rows]
        return StepResult(tokens, self.logprobs, self.invalid_rows)

    def exchange(self, step: DefragStep) -> None:
        self.fail(step)
        self.exchanged.append(step)

    def clear(self, blocks: Sequence[int]) -> None:
        self.cleared += blocks


def _with_nan_in(block: int, run: Callable[[Step], StepResult]) -> Callable[[Step], StepResult]:
    """What `run` answers, but that rows which have `block` are NaN."""

    def answer(step: Step) -> StepResult:
        return replace(
            run(step), invalid_rows={r for r, row in enumerate(step.rows) if block in row.block_table}
        )

    return answer


def _core(
    runner: ScriptedRunner, table: BucketTable = TABLE, *, prefix_caching: bool = False, **options: object
) -> EngineCore:
    pool = BlockPool(LIMITS.num_blocks)
    scheduler = Scheduler(LIMITS, table, pool, eos_token_ids=(EOS,), prefix_caching=prefix_caching)
    return EngineCore(scheduler, runner, **options)  # type: ignore[arg-type]


def _add(
    core: EngineCore, name: str, num_prompt_tokens: int = 3, max_tokens: int = 3, **params: object
) -> tuple[OutputStream, list[Event]]:
    request = request_of((1,) * num_prompt_tokens, max_tokens, SamplingParams(**params), name=name)  # type: ignore[arg-type]
    events: list[Event] = []
    detokenizer = IncrementalDetokenizer(lambda ids: "".join(map(chr, ids)))
    stream = OutputStream(request, detokenizer, events.append)
    core.add(stream)
    return stream, events


def _drive(core: EngineCore) -> int:
    for count in range(200):
        if not core.step():
            return count
    raise AssertionError("200 steps were not enough")


def _text(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TokenEvent))


class TestEvents:
    def test_one_event_a_token_and_usage_at_the_end(self) -> None:
        core = _core(ScriptedRunner("abc"))
        stream, events = _add(core, "r")

        assert _drive(core) == 3

        assert events == [
            TokenEvent(request_id="r", text="a", token_ids=(97,)),
            TokenEvent(request_id="r", text="b", token_ids=(98,)),
            TokenEvent(request_id="r", text="c", token_ids=(99,), finish_reason="length", usage=Usage(3, 3)),
        ]
        assert core.take_ended() == [stream]
        assert core.take_ended() == []

    def test_log_probabilities_go_with_the_token_of_their_row(self) -> None:
        runner = ScriptedRunner("ab")
        core = _core(runner)
        _, plain = _add(core, "plain", max_tokens=2)
        _, logged = _add(core, "logged", max_tokens=2)
        values = TokenLogprobs(-0.5, ((97, -0.5), (98, -1.0)))
        runner.logprobs = {1: values}

        _drive(core)

        assert [event.logprobs for event in logged if isinstance(event, TokenEvent)] == [(values,), (values,)]
        assert [event.logprobs for event in plain if isinstance(event, TokenEvent)] == [(), ()]

    def test_the_token_that_ends_a_request_has_no_text(self) -> None:
        core = _core(ScriptedRunner("a$"))
        _, events = _add(core, "r")

        _drive(core)

        assert _text(events) == "a"
        assert events[-1] == TokenEvent(
            request_id="r", text="", token_ids=(EOS,), finish_reason="stop", usage=Usage(3, 2)
        )

    def test_a_stop_string_ends_the_request_and_frees_its_blocks(self) -> None:
        core = _core(ScriptedRunner("abcdef"))
        stream, events = _add(core, "r", max_tokens=20, stop=("cd",))

        assert _drive(core) == 4

        assert [event.text for event in events if isinstance(event, TokenEvent)] == ["a", "b", "", ""]
        assert isinstance(events[-1], TokenEvent)
        assert events[-1].finish_reason == "stop"
        assert stream.request.finish_reason == "stop"
        assert core.scheduler.pool.num_used == 0
        assert core.stats().num_finished == {"stop": 1}

    def test_a_stop_string_that_the_last_token_completes_is_a_stop(self) -> None:
        core = _core(ScriptedRunner("abc"))
        _, events = _add(core, "r", max_tokens=3, stop=("bc",))

        _drive(core)

        assert _text(events) == "a"
        assert isinstance(events[-1], TokenEvent)
        assert events[-1].finish_reason == "stop"

    def test_text_that_was_held_back_comes_with_the_last_event(self) -> None:
        core = _core(ScriptedRunner("abc"))
        _, events = _add(core, "r", max_tokens=3, stop=("bcd",))

        _drive(core)

        assert [event.text for event in events if isinstance(event, TokenEvent)] == ["a", "", "bc"]

    @pytest.mark.parametrize("num_steps", [0, 1, 2])
    def test_an_abort_frees_the_blocks_and_is_told_once(self, num_steps: int) -> None:
        core = _core(ScriptedRunner())
        stream, events = _add(core, "r", max_tokens=20)
        for _ in range(num_steps):
            core.step()

        core.abort(stream)
        core.abort(stream)

        assert core.scheduler.pool.num_used == 0
        assert not core.scheduler.has_work
        assert len(events) == num_steps + 1
        assert events[-1] == TokenEvent(
            request_id="r", text="", token_ids=(), finish_reason="abort", usage=Usage(3, num_steps)
        )

    def test_an_owner_that_cannot_be_told_is_gone(self) -> None:
        core = _core(ScriptedRunner())
        deaf, _ = _add(core, "deaf", max_tokens=9)
        _, events = _add(core, "other", max_tokens=2)

        def refuse(event: Event) -> None:
            raise RuntimeError("Event loop is closed")

        deaf.on_event = refuse
        _drive(core)

        assert deaf.request.finish_reason == "abort"
        assert deaf.request.num_output_tokens == 1
        assert len(events) == 2
        assert core.stats().num_finished == {"abort": 1, "length": 1}


def _num_steps(stats: EngineStats) -> dict[Entry, int]:
    return {entry: counters.steps.num for entry, counters in stats.counters.entries.items()}


class TestFailures:
    def test_a_failed_step_takes_its_own_requests_and_no_others(self) -> None:
        runner = ScriptedRunner()
        core = _core(runner)
        _, first = _add(core, "first")
        _, second = _add(core, "second")
        _, third = _add(core, "third", max_tokens=1)
        fault = RuntimeError("device lost")

        def fail_prompts(step: Step | DefragStep) -> None:
            if isinstance(step.entry, PromptEntry):
                runner.fail = lambda step: None
                raise fault

        runner.fail = fail_prompts
        _drive(core)

        assert first == [ErrorEvent(request_id="first", error=fault)]
        assert second == [ErrorEvent(request_id="second", error=fault)]
        assert _text(third) == "a"
        stats = core.stats()
        assert (stats.num_failed_steps, stats.num_finished) == (1, {"error": 2, "length": 1})
        assert stats.num_blocks_used == 0
        assert _num_steps(stats) == {PROMPT: 1}

    def test_a_row_of_nan_fails_its_own_request_and_no_other(self, caplog: pytest.LogCaptureFixture) -> None:
        runner = ScriptedRunner()
        core = _core(runner)
        _, broken = _add(core, "broken", max_tokens=1)
        _, sound = _add(core, "sound")
        _add(core, "chunked", num_prompt_tokens=20)
        runner.invalid_rows = {0}
        core.step()
        runner.invalid_rows = set()
        _, second = _add(core, "second")
        _drive(core)

        (event,) = broken
        assert isinstance(event, ErrorEvent)
        assert isinstance(event.error, RequestError)
        assert (event.error.http_status, event.error.param) == (500, None)
        assert "NaN" in str(event.error)
        assert [_text(events) for events in (sound, second)] == ["abd", "efg"]
        stats = core.stats()
        assert (stats.num_invalid_logits, stats.num_failed_steps) == (1, 0)
        assert stats.num_finished == {"error": 1, "length": 3}
        assert stats.num_blocks_used == 0
        assert len(caplog.records) == 1

    def test_what_a_request_of_nan_leaves_is_cleared_and_nobody_is_given_it(self) -> None:
        runner = ScriptedRunner("abcdefghijklmnopqrstuvwxyz")
        core = _core(runner, prefix_caching=True)
        sound, _ = _add(core, "sound", num_prompt_tokens=9, max_tokens=8)
        core.step()
        broken, events = _add(core, "broken", num_prompt_tokens=9, max_tokens=8)
        while not broken.request.block_table:
            core.step()
        assert broken.request.block_table[:2] == sound.request.block_table[:2]
        own = broken.request.block_table[2:]

        run = runner.run
        runner.run = _with_nan_in(own[0], run)  # type: ignore[method-assign]
        while not broken.request.is_finished:
            core.step()
        runner.run = run  # type: ignore[method-assign]

        assert isinstance(events[-1], ErrorEvent)
        assert runner.cleared == own
        assert core.stats().num_prefix_hits == 8
        third, _ = _add(core, "third", num_prompt_tokens=9, max_tokens=1)
        _drive(core)
        assert third.request.num_cached_tokens == 0
        assert sound.request.finish_reason == "length"

    def test_a_chunk_of_nan_fails_before_the_prompt_ends(self) -> None:
        runner = ScriptedRunner()
        core = _core(runner)
        _, events = _add(core, "r", num_prompt_tokens=20)
        runner.invalid_rows = {0}

        assert _drive(core) == 1

        assert isinstance(events[0], ErrorEvent)
        assert core.scheduler.pool.num_used == 0

    def test_a_runner_that_answers_too_little_fails_the_step(self) -> None:
        runner = ScriptedRunner()
        runner.run = lambda step: StepResult([])  # type: ignore[method-assign]
        core = _core(runner)
        _, events = _add(core, "r")

        _drive(core)

        assert isinstance(events[-1], ErrorEvent)
        assert "0 tokens for 1 rows" in str(events[-1].error)

    def test_a_failed_exchange_takes_the_requests_whose_blocks_moved(self) -> None:
        runner = ScriptedRunner()
        core = _core(runner, defrag=DefragSpec(threshold=1, padded_swaps=(1,)))
        first, _ = _add(core, "first", num_prompt_tokens=11, max_tokens=20)
        _, second = _add(core, "second", num_prompt_tokens=2, max_tokens=2)
        _, third = _add(core, "third", num_prompt_tokens=2, max_tokens=5)

        def fail_exchange(step: Step | DefragStep) -> None:
            if isinstance(step.entry, DefragEntry):
                raise RuntimeError("no exchange")

        runner.fail = fail_exchange
        core.step()
        core.step()
        core.step()
        core.abort(first)
        _drive(core)

        assert isinstance(third[-1], ErrorEvent)
        assert isinstance(second[-1], TokenEvent)
        assert second[-1].finish_reason == "length"
        assert core.scheduler.pool.num_used == 0


class TestUncovered:
    HOLED = BucketTable((PromptEntry(1, 4, 0),), (DECODE,))

    def test_the_request_fails_and_the_next_one_runs(self) -> None:
        core = _core(ScriptedRunner(), self.HOLED)
        _, long = _add(core, "long", num_prompt_tokens=9)
        _, short = _add(core, "short", num_prompt_tokens=4, max_tokens=1)

        _drive(core)

        assert isinstance(long[-1], ErrorEvent)
        assert isinstance(long[-1].error, CoverageError)
        assert _text(short) == "b"


class TestObservation:
    def test_steps_are_timed_by_the_clock_that_was_given(self) -> None:
        ticks = iter(range(100))
        seen: list[tuple[Entry, float, int]] = []
        core = _core(
            ScriptedRunner(), clock=lambda: next(ticks) * 0.5, on_step=lambda *step: seen.append(step)
        )
        _add(core, "a", max_tokens=2)
        _add(core, "b", max_tokens=2)

        _drive(core)

        assert seen == [(PROMPT, 0.5, 2), (DECODE, 0.5, 2)]
        stats = core.stats()
        assert _num_steps(stats) == {PROMPT: 1, DECODE: 1}
        kinds = stats.counters.by_kind()
        assert {kind: counters.work for kind, counters in kinds.items()} == {
            "prompt": StepWork(6, 26, 0, 16),
            "decode": StepWork(2, 2, 2, 14),
        }

    def test_an_observer_that_fails_harms_nobody(self) -> None:
        def fail(entry: Entry, seconds: float, num_rows: int) -> None:
            raise RuntimeError("no metrics today")

        core = _core(ScriptedRunner(), on_step=fail)
        _, events = _add(core, "r")

        _drive(core)

        assert _text(events) == "abc"

    def test_a_defragmentation_is_run_counted_and_observed(self) -> None:
        runner, seen = ScriptedRunner(), list[tuple[Entry, int]]()
        core = _core(
            runner,
            defrag=DefragSpec(threshold=1, padded_swaps=(1, 8)),
            on_step=lambda entry, seconds, num_rows: seen.append((entry, num_rows)),
        )
        first, _ = _add(core, "first", num_prompt_tokens=12, max_tokens=20)
        second, _ = _add(core, "second", num_prompt_tokens=4, max_tokens=9)
        core.step()
        core.step()
        assert (first.request.block_table, second.request.block_table) == ([1, 2, 3, 5], [4, 6])

        core.abort(first)
        core.step()

        assert runner.exchanged == [DefragStep(DefragEntry(8), ((6, 1), (4, 2)))]
        assert second.request.block_table == [2, 1]
        assert seen[-1] == (DefragEntry(8), 2)
        assert core.stats().num_defrag_swaps == 2
