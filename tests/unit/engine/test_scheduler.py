from __future__ import annotations

import time
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.engine.blocks import BlockPool
from aotgaudi.engine.request import Request, RequestState
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.engine.scheduler import Scheduled, Scheduler, UncoveredStepError
from aotgaudi.engine.steps import DecodeRow, DecodeStep, PromptRow, PromptStep, SamplingRow
from aotgaudi.entries import DecodeEntry, DefragEntry, PromptEntry
from aotgaudi.errors import AotGaudiError, CoverageError
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.policy import Policy
from tests.driving import request_of, step_once

EOS = 99
ANY_PROMPT = (PromptEntry(4, 64, 16),)
ANY_DECODE = (DecodeEntry(4, 1, 64),)


def _scheduler(
    *,
    prompt: Sequence[PromptEntry] = ANY_PROMPT,
    decode: Sequence[DecodeEntry] = ANY_DECODE,
    num_blocks: int = 32,
    policy: Policy = "latency",
    **limits: int,
) -> Scheduler:
    values = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "block_size": 4,
        "num_blocks": num_blocks,
    }
    return Scheduler(
        ServingLimits(**{**values, **limits}),
        BucketTable(tuple(prompt), tuple(decode)),
        BlockPool(num_blocks),
        eos_token_ids=(EOS,),
        policy=policy,
    )


def _add(
    scheduler: Scheduler,
    num_prompt_tokens: int,
    *,
    max_tokens: int = 32,
    **params: object,
) -> Request:
    request = request_of(
        tuple(range(num_prompt_tokens)), max_tokens, SamplingParams(**params), name=f"r{num_prompt_tokens}"
    )  # type: ignore[arg-type]
    scheduler.add(request)
    return request


def _prompt_rows(scheduled: Scheduled) -> tuple[PromptRow, ...]:
    assert isinstance(scheduled.step, PromptStep)
    return scheduled.step.rows


def _decode_rows(scheduled: Scheduled) -> tuple[DecodeRow, ...]:
    assert isinstance(scheduled.step, DecodeStep)
    return scheduled.step.rows


class TestPrefillAndDecode:
    def test_nothing_to_do(self) -> None:
        scheduler = _scheduler()

        assert scheduler.schedule() is None
        assert not scheduler.has_work

    def test_a_prompt_then_a_token_astep_once(self) -> None:
        scheduler = _scheduler(prompt=[PromptEntry(1, 8, 0)], decode=[DecodeEntry(2, 1, 8)])
        request = _add(scheduler, 6, max_tokens=3)

        prefill, first, second = (step_once(scheduler, token_id) for token_id in (7, 8, 9))

        assert prefill.step.entry == PromptEntry(1, 8, 0)
        assert prefill.step.rows == (PromptRow((0, 1, 2, 3, 4, 5), 0, (1, 2), _any_sampling(prefill)),)
        assert first.step.entry == DecodeEntry(2, 1, 8)
        assert [(row.token_id, row.position, row.block_table) for row in _decode_rows(first)] == [
            (7, 6, (1, 2))
        ]
        assert [(row.token_id, row.position) for row in _decode_rows(second)] == [(8, 7)]
        assert tuple(request.token_ids[request.num_prompt_tokens :]) == (7, 8, 9)
        assert request.finish_reason == "length"
        assert scheduler.pool.num_used == 0
        assert scheduler.schedule() is None

    def test_a_block_is_added_exactly_when_the_newest_token_needs_it(self) -> None:
        scheduler = _scheduler()
        _add(scheduler, 3, max_tokens=7)

        tables = [len(_prompt_rows(step_once(scheduler))[0].block_table)]
        tables += [len(_decode_rows(step_once(scheduler))[0].block_table) for _ in range(6)]

        assert tables == [1, 1, 2, 2, 2, 2, 3]

    def test_both_kinds_of_work_take_turns(self) -> None:
        scheduler = _scheduler(max_num_seqs=4)
        for num_tokens in (4, 5, 6, 7):
            _add(scheduler, num_tokens)

        kinds = [step_once(scheduler).step.entry.kind for _ in range(8)]

        assert kinds == ["prompt", "decode"] * 3 + ["prompt", "decode"]

    def test_a_long_prompt_does_not_stall_decoding(self) -> None:
        scheduler = _scheduler(max_num_batched_tokens=4)
        _add(scheduler, 2)
        step_once(scheduler)
        _add(scheduler, 16)

        kinds = [step_once(scheduler).step.entry.kind for _ in range(8)]

        assert kinds == ["decode", "prompt"] * 4


class TestPolicies:
    PROMPTS = (PromptEntry(1, 4, 64), PromptEntry(1, 16, 64), PromptEntry(1, 64, 64))

    def _chunk_lens(self, scheduler: Scheduler, num: int) -> list[int]:
        """Runs steps, of which those of prompts take 1 ms a padded token, and those of decodes 20 ms."""
        lengths = []
        while len(lengths) < num:
            scheduled = step_once(scheduler)
            entry = scheduled.step.entry
            scheduler.observe(entry, entry.query_len * 1e-3 if isinstance(entry, PromptEntry) else 0.02)
            if isinstance(entry, PromptEntry):
                lengths.append(len(_prompt_rows(scheduled)[0].token_ids))
        return lengths

    def test_latency_bounds_a_chunk_beside_decodes_by_what_steps_took(self) -> None:
        scheduler = _scheduler(prompt=self.PROMPTS, max_model_len=256, num_blocks=128)
        for _ in range(2):
            _add(scheduler, 3, max_tokens=200)
        self._chunk_lens(scheduler, 2)
        _add(scheduler, 150, max_tokens=1)

        assert self._chunk_lens(scheduler, 7) == [16, 64, 16, 16, 16, 16, 6]

    @pytest.mark.parametrize(
        ("num_waiting", "max_num_seqs", "expected"), [(1, 8, 16), (2, 8, 64), (9, 3, 64), (9, 2, 16)]
    )
    def test_a_chunk_may_be_of_any_length_where_more_wait_and_could_have_a_seat_than_decode(
        self, num_waiting: int, max_num_seqs: int, expected: int
    ) -> None:
        """One decodes, for 20 ms a step; 64 tokens take 64 ms, which is more than one and a half of these."""
        scheduler = _scheduler(
            prompt=self.PROMPTS, max_num_seqs=max_num_seqs, max_model_len=256, num_blocks=512
        )
        _add(scheduler, 3, max_tokens=200)
        self._chunk_lens(scheduler, 1)
        scheduler.observe(step_once(scheduler).step.entry, 0.02)
        for entry in self.PROMPTS:
            scheduler.observe(entry, entry.query_len * 1e-3)
        for _ in range(num_waiting):
            _add(scheduler, 130, max_tokens=100)

        assert self._chunk_lens(scheduler, 1) == [expected]

    def test_who_has_waited_long_may_have_longer_steps(self) -> None:
        """64 tokens take 64 ms, more than one and a half decode steps of 20; after 2.1 s they are allowed."""
        scheduler = _scheduler(prompt=self.PROMPTS, max_model_len=256, num_blocks=128, max_num_seqs=2)
        _add(scheduler, 3, max_tokens=200)
        self._chunk_lens(scheduler, 1)
        scheduler.observe(step_once(scheduler).step.entry, 0.02)
        for entry in self.PROMPTS:
            scheduler.observe(entry, entry.query_len * 1e-3)
        _add(scheduler, 200, max_tokens=10)

        before = self._chunk_lens(scheduler, 1)
        scheduler.observe(DefragEntry(8), 2.1)

        assert before == [16]
        assert self._chunk_lens(scheduler, 1) == [64]

    def test_throughput_fills_the_seats_first_and_decodes_at_last(self) -> None:
        scheduler = _scheduler(policy="throughput", max_num_seqs=3)
        for _ in range(4):
            _add(scheduler, 3, max_tokens=3)

        kinds = [step_once(scheduler).step.entry.kind for _ in range(7)]

        assert kinds == ["prompt"] * 3 + ["decode"] * 2 + ["prompt", "decode"]

    def test_throughput_lets_decodes_go_on_under_a_stream_of_prompts(self) -> None:
        scheduler = _scheduler(policy="throughput", max_num_seqs=3)
        writer = _add(scheduler, 3, max_tokens=10)
        for _ in range(60):
            _add(scheduler, 3, max_tokens=1)
            step_once(scheduler)

        assert writer.is_finished

    def test_prompts_that_are_padded_more_together_have_steps_of_their_own(self) -> None:
        scheduler = _scheduler(
            prompt=[*self.PROMPTS, PromptEntry(2, 4, 16), PromptEntry(2, 64, 16)], max_num_prefill_seqs=4
        )
        for num_tokens in (3, 4, 60, 2):
            _add(scheduler, num_tokens, max_tokens=1)

        steps = [step_once(scheduler) for _ in range(3)]

        assert [[len(row.token_ids) for row in _prompt_rows(step)] for step in steps] == [[3, 4], [60], [2]]


def _any_sampling(scheduled: Scheduled) -> SamplingRow | None:
    return scheduled.step.rows[0].sampling


class TestChunks:
    def test_chunks_are_whole_blocks_and_only_the_last_one_samples(self) -> None:
        scheduler = _scheduler(max_num_batched_tokens=10)
        _add(scheduler, 19)

        rows = [_prompt_rows(step_once(scheduler))[0] for _ in range(3)]

        assert [(row.start, len(row.token_ids)) for row in rows] == [(0, 8), (8, 8), (16, 3)]
        assert [row.sampling is None for row in rows] == [True, True, False]
        assert [row.block_table for row in rows] == [(1, 2), (1, 2, 3, 4), (1, 2, 3, 4, 5)]

    def test_a_chunk_is_as_long_as_an_entry_covers(self) -> None:
        scheduler = _scheduler(prompt=[PromptEntry(1, 16, 0), PromptEntry(1, 5, 4), PromptEntry(1, 4, 8)])
        _add(scheduler, 26)

        steps = [step_once(scheduler) for _ in range(4)]

        assert [len(_prompt_rows(step)[0].token_ids) for step in steps] == [16, 4, 4, 2]
        assert [step.step.entry for step in steps] == [
            PromptEntry(1, 16, 0),
            *[PromptEntry(1, 4, 8)] * 3,
        ]

    def test_rows_are_packed_up_to_the_limit_and_the_budget(self) -> None:
        scheduler = _scheduler(max_num_prefill_seqs=3, max_num_batched_tokens=16)
        for num_tokens in (5, 6, 7, 8):
            _add(scheduler, num_tokens)

        step = step_once(scheduler)

        assert [len(row.token_ids) for row in _prompt_rows(step)] == [5, 6, 4]
        assert len(scheduler.waiting) == 1

    def test_fewer_rows_are_packed_where_no_entry_covers_more(self) -> None:
        scheduler = _scheduler(prompt=[PromptEntry(2, 6, 0), PromptEntry(1, 8, 0)], max_num_prefill_seqs=4)
        for num_tokens in (5, 6, 7):
            _add(scheduler, num_tokens)

        steps = [step_once(scheduler), step_once(scheduler), step_once(scheduler)]

        assert [len(step.requests) for step in steps] == [2, 2, 1]
        assert steps[2].step.entry == PromptEntry(1, 8, 0)
        assert len(scheduler.waiting) == 0

    def test_a_partly_prefilled_request_goes_before_the_queue(self) -> None:
        scheduler = _scheduler(max_num_batched_tokens=4)
        first, second = _add(scheduler, 8), _add(scheduler, 4)

        order = [step_once(scheduler).requests for _ in range(2)]

        assert order == [(first,), (first,)]
        assert second.state is RequestState.WAITING


class TestAdmission:
    def test_seats_are_limited(self) -> None:
        scheduler = _scheduler(max_num_seqs=1)
        first, second = _add(scheduler, 4, max_tokens=2), _add(scheduler, 5)

        assert [step_once(scheduler).requests for _ in range(3)] == [(first,), (first,), (second,)]

    def test_nobody_overtakes_a_head_that_waits_for_blocks(self) -> None:
        scheduler = _scheduler(num_blocks=4)
        _add(scheduler, 8)
        head, small = _add(scheduler, 12), _add(scheduler, 1)
        step_once(scheduler)

        step_once(scheduler)

        assert tuple(scheduler.waiting) == (head, small)


class TestPreemption:
    def _two_running(self) -> tuple[Scheduler, Request, Request]:
        """Two requests of 4 tokens in 3 blocks: the second block of the younger one is not there."""
        scheduler = _scheduler(num_blocks=3)
        older, younger = _add(scheduler, 4), _add(scheduler, 4)
        step_once(scheduler)
        step_once(scheduler)
        step_once(scheduler)
        assert (older.num_output_tokens, younger.num_output_tokens) == (2, 1)
        return scheduler, older, younger

    def test_the_youngest_gives_way_and_keeps_its_tokens(self) -> None:
        scheduler, older, younger = self._two_running()

        step = step_once(scheduler)

        assert step.requests == (older,)
        assert tuple(scheduler.waiting) == (younger,)
        assert scheduler.num_preemptions == 1
        assert younger.block_table == []
        assert tuple(younger.token_ids[younger.num_prompt_tokens :]) == (7,)

    def test_it_returns_at_the_front_and_is_prefilled_with_its_tokens(self) -> None:
        scheduler, older, younger = self._two_running()
        late = _add(scheduler, 1)
        step_once(scheduler)
        assert tuple(scheduler.waiting) == (younger, late)

        scheduler.finish(older, "abort")
        step = step_once(scheduler)

        assert step.requests == (younger,)
        assert _prompt_rows(step)[0].token_ids == (0, 1, 2, 3, 7)
        assert tuple(scheduler.waiting) == (late,)

    def test_several_victims_return_in_their_order(self) -> None:
        scheduler = _scheduler(num_blocks=8, max_num_prefill_seqs=4)
        oldest, second, third = _add(scheduler, 16), _add(scheduler, 8), _add(scheduler, 8)
        step_once(scheduler)

        step_once(scheduler)

        assert tuple(scheduler.running) == (oldest, second)
        assert tuple(scheduler.waiting) == (third,)
        for _ in range(3):
            step_once(scheduler)
        scheduler.check_integrity()
        assert oldest.num_output_tokens == 5


class TestHoles:
    def test_a_decode_batch_is_shrunk_and_the_others_go_first_next_time(self) -> None:
        scheduler = _scheduler(decode=[DecodeEntry(2, 1, 64)], max_num_prefill_seqs=3)
        first, second, third = (_add(scheduler, 4) for _ in range(3))
        step_once(scheduler)

        order = [step_once(scheduler).requests for _ in range(3)]

        assert order == [(first, second), (third, first), (second, third)]

    def test_a_decode_batch_is_shrunk_to_the_blocks_of_the_entry(self) -> None:
        scheduler = _scheduler(decode=[DecodeEntry(8, 1, 4)], max_num_prefill_seqs=3)
        first, second, _ = (_add(scheduler, 5) for _ in range(3))
        step_once(scheduler)

        assert step_once(scheduler).requests == (first, second)

    def test_an_uncovered_prompt_is_named(self) -> None:
        scheduler = _scheduler(prompt=[PromptEntry(1, 3, 0)])
        request = _add(scheduler, 6)

        with pytest.raises(UncoveredStepError, match=r"\(prompt, 1, 6, 0\).*'r6'") as hole:
            scheduler.schedule()

        assert isinstance(hole.value, CoverageError)
        assert (hole.value.request, hole.value.needed) == (request, PromptEntry(1, 6, 0))
        scheduler.finish(request, "abort")
        assert scheduler.schedule() is None

    def test_an_uncovered_later_chunk_is_named(self) -> None:
        scheduler = _scheduler(prompt=[PromptEntry(1, 8, 0)], max_num_batched_tokens=8)
        _add(scheduler, 20)
        step_once(scheduler)

        with pytest.raises(UncoveredStepError) as hole:
            scheduler.schedule()

        assert hole.value.needed == PromptEntry(1, 8, 2)

    def test_an_uncovered_decode_is_named_and_the_others_go_on_without_it(self) -> None:
        scheduler = _scheduler(decode=[DecodeEntry(4, 1, 2)], max_num_prefill_seqs=2)
        large, small = _add(scheduler, 12), _add(scheduler, 4)
        step_once(scheduler)

        with pytest.raises(UncoveredStepError) as hole:
            scheduler.schedule()

        assert (hole.value.request, hole.value.needed) == (large, DecodeEntry(1, 1, 4))
        scheduler.finish(large, "abort")
        assert step_once(scheduler).requests == (small,)


class TestEnds:
    @pytest.mark.parametrize(
        ("params", "token_id", "reason", "stop_token_id"),
        [
            ({}, EOS, "stop", None),
            ({"ignore_eos": True}, EOS, None, None),
            ({"stop_token_ids": (5,)}, 5, "stop", 5),
            ({"stop_token_ids": (5, EOS)}, EOS, "stop", None),
            ({"stop_token_ids": (5,), "ignore_eos": True}, 5, "stop", 5),
            ({}, 5, None, None),
        ],
    )
    def test_tokens_that_end_a_request(
        self, params: dict[str, Any], token_id: int, reason: str | None, stop_token_id: int | None
    ) -> None:
        scheduler = _scheduler()
        request = _add(scheduler, 4, **params)

        step_once(scheduler, token_id)

        assert (request.finish_reason, request.stop_token_id) == (reason, stop_token_id)
        assert tuple(request.token_ids[request.num_prompt_tokens :]) == (token_id,)

    def test_the_model_length_ends_a_request(self) -> None:
        scheduler = _scheduler(max_model_len=6)
        request = _add(scheduler, 4, max_tokens=1000)

        step_once(scheduler)
        step_once(scheduler)

        assert (request.num_tokens, request.finish_reason) == (6, "length")

    def test_a_waiting_request_can_be_finished(self) -> None:
        scheduler = _scheduler()
        request = _add(scheduler, 4)

        scheduler.finish(request, "abort")

        assert scheduler.schedule() is None

    @pytest.mark.parametrize("answer", [[], [1, 2], [None]])
    def test_an_answer_that_does_not_fit_the_rows_changes_nothing(self, answer: list[int | None]) -> None:
        scheduler = _scheduler()
        request = _add(scheduler, 4)
        scheduled = scheduler.schedule()
        assert scheduled is not None

        with pytest.raises(AotGaudiError, match="the runner"):
            scheduler.complete(scheduled, answer)

        assert (request.num_computed_tokens, request.num_tokens) == (0, 4)


class TestRelocation:
    def test_block_tables_follow(self) -> None:
        scheduler = _scheduler(max_num_prefill_seqs=2)
        gone, stays = _add(scheduler, 8), _add(scheduler, 8)
        step_once(scheduler)
        scheduler.finish(gone, "abort")
        assert stays.block_table == [3, 4]
        assert scheduler.owners([4]) == (stays,)

        scheduler.relocate([(4, 1), (3, 2)])

        assert stays.block_table == [2, 1]
        assert scheduler.owners([3, 4]) == ()
        scheduler.check_integrity()

    def test_check_integrity_sees_a_shared_block(self) -> None:
        scheduler = _scheduler(max_num_prefill_seqs=2)
        first, second = _add(scheduler, 4), _add(scheduler, 4)
        step_once(scheduler)

        second.block_table = list(first.block_table)

        with pytest.raises(RuntimeError, match="block tables hold"):
            scheduler.check_integrity()


def test_leaving_a_long_queue_costs_little_wherever_one_stands() -> None:
    scheduler = _scheduler()
    requests = [_add(scheduler, 1) for _ in range(20_000)]
    gone = requests[1:]
    Random(0).shuffle(gone)

    started = time.process_time()
    for request in gone:
        scheduler.finish(request, "abort")

    assert time.process_time() - started < 1
    assert tuple(scheduler.waiting) == (requests[0],)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.integers(-30, 30), st.none()), max_size=60))
def test_requests_stay_in_the_order_of_their_arrival_whoever_leaves(actions: list[int | None]) -> None:
    """A positive number adds a request of that length, another ends one of those that are there, None is a step."""
    scheduler = _scheduler(num_blocks=9)
    arrived: list[Request] = []
    for action in actions:
        if action is None:
            if scheduler.has_work:
                step_once(scheduler)
        elif action > 0:
            arrived.append(_add(scheduler, action, max_tokens=37 - action))
        elif arrived:
            scheduler.finish(arrived[action % len(arrived)], "abort")
        arrived = [request for request in arrived if not request.is_finished]

        assert [*scheduler.running, *scheduler.waiting] == arrived
        assert scheduler.oldest_waiting is next(iter(scheduler.waiting), None)
        scheduler.check_integrity()
