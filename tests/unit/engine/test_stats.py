"""What is counted of each entry, against a model that keeps every step."""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.engine.request import Request
from aotgaudi.engine.stats import GAP_BOUNDS, Counters, EntryCounters, Total
from aotgaudi.engine.steps import (
    GREEDY_ROW,
    DecodeRow,
    DecodeStep,
    DefragStep,
    PromptRow,
    PromptStep,
    StepWork,
    work_of,
)
from aotgaudi.entries import DecodeEntry, DefragEntry, PromptEntry
from tests.driving import request_of

BLOCK_SIZE = 4
PROMPT, OTHER_PROMPT = PromptEntry(2, 8, 2), PromptEntry(1, 4, 0)
DECODE = DecodeEntry(4, 1, 8)


def request(name: str = "r", num_tokens: int = 3, arrived_at: float = 0.0, num_cached: int = 0) -> Request:
    new = request_of([1] * num_tokens, 9, name=name, arrived_at=arrived_at)
    new.num_cached_tokens = num_cached
    new.admit([1])
    return new


def prompt_step(num_rows: int, num_tokens: int = 3, entry: PromptEntry = PROMPT) -> PromptStep:
    row = PromptRow((1,) * num_tokens, 4, (1, 2), GREEDY_ROW)
    return PromptStep(entry, (row,) * num_rows)


def decode_step(num_rows: int) -> DecodeStep:
    return DecodeStep(DECODE, (DecodeRow(1, 5, (1, 2), GREEDY_ROW),) * num_rows)


@dataclass
class Counted:
    """Counters, and requests that get their tokens as the engine gives them."""

    counters: Counters = field(default_factory=Counters)

    def prompt(self, requests: list[Request], begin: float, end: float, *, sampled: bool = True) -> None:
        got = requests if sampled else []
        for one in got:
            one.append_token(7)
        self.counters.count(prompt_step(len(requests)), BLOCK_SIZE, requests, got, (begin, end))

    def decode(self, requests: list[Request], begin: float, end: float) -> None:
        for one in requests:
            one.append_token(7)
        self.counters.count(decode_step(len(requests)), BLOCK_SIZE, requests, requests, (begin, end))

    def of(self, entry: object) -> EntryCounters:
        return self.counters.snapshot().entries[entry]  # type: ignore[index]


def test_nothing_is_there_before_the_first_step() -> None:
    snapshot = Counters().snapshot()

    assert snapshot.entries == {}
    assert snapshot.by_kind() == {"prompt": EntryCounters(), "decode": EntryCounters()}
    assert sum(snapshot.gap_counts) == 0


def test_a_step_counts_its_seconds_and_what_it_computed_and_padded() -> None:
    counted = Counted()

    counted.prompt([request()], 10.0, 10.5)

    counters_of_entry = counted.of(PROMPT)
    assert counters_of_entry.steps == Total(1, 0.5)
    assert counters_of_entry.work == StepWork(3, 13, 1, 3)


def test_a_request_queues_up_to_its_first_chunk_and_only_once() -> None:
    counted, one = Counted(), request(arrived_at=1.0, num_tokens=8, num_cached=4)

    counted.prompt([one], 3.0, 3.25, sampled=False)
    counted.prompt([one], 3.5, 4.0)
    one.preempt()
    one.admit([1])
    counted.prompt([one], 9.0, 9.5)

    counters_of_entry = counted.of(PROMPT)
    assert counters_of_entry.queue == Total(1, 2.0)
    assert counters_of_entry.first_token == Total(1, 3.0)
    assert (counters_of_entry.num_prefix_tokens, counters_of_entry.num_cached_tokens) == (8, 4)
    assert one.queue_seconds == 2.0
    assert counters_of_entry.gaps == Total(1, 5.5), "the token after a preemption comes later"


def test_a_gap_is_the_time_since_the_requests_own_last_token() -> None:
    counted, early, late = Counted(), request("a"), request("b")

    counted.prompt([early], 0.0, 1.0)
    counted.decode([early], 1.0, 1.5)
    counted.prompt([late], 1.5, 2.0)
    counted.decode([early, late], 2.0, 2.5)

    assert counted.of(DECODE).gaps == Total(3, 0.5 + 1.0 + 0.5)
    assert counted.of(PROMPT).gaps == Total(0, 0.0)
    snapshot = counted.counters.snapshot()
    assert snapshot.gap_seconds == 2.0
    assert snapshot.gap_counts[bisect_left(GAP_BOUNDS, 0.5)] == 2
    assert snapshot.gap_counts[bisect_left(GAP_BOUNDS, 1.0)] == 1


def test_a_gap_beyond_all_bounds_is_in_the_last_bucket() -> None:
    counted, one = Counted(), request()

    counted.prompt([one], 0.0, 0.0)
    counted.decode([one], 0.0, GAP_BOUNDS[-1] + 1)

    assert counted.counters.snapshot().gap_counts[-1] == 1


def test_a_defragmentation_has_steps_and_no_tokens() -> None:
    counters = Counters()

    counters.count_defrag(DefragStep(DefragEntry(4), ((3, 1),)), 0.25)

    assert counters.snapshot().entries == {DefragEntry(4): EntryCounters(steps=Total(1, 0.25))}
    assert counters.snapshot().by_kind()["defrag"].steps == Total(1, 0.25)


def test_a_snapshot_is_of_its_moment() -> None:
    counted = Counted()
    counted.prompt([request()], 0.0, 1.0)
    before = counted.counters.snapshot()

    counted.prompt([request()], 1.0, 2.0)

    assert before.entries[PROMPT].steps == Total(1, 1.0)
    assert before.entries[PROMPT].queue.num == 1


def test_entries_are_in_the_order_of_their_first_step() -> None:
    counters = Counters()
    for entry in (OTHER_PROMPT, PROMPT, OTHER_PROMPT):
        counters.count(prompt_step(1, entry=entry), BLOCK_SIZE, [], [], (0.0, 1.0))

    assert list(counters.snapshot().entries) == [OTHER_PROMPT, PROMPT]


events = st.lists(
    st.tuples(
        st.sampled_from(["join", "decode"]), st.sets(st.integers(0, 5), max_size=6), st.integers(1, 64)
    ),
    max_size=30,
)


@given(events)
def test_every_token_is_one_first_or_one_gap_and_the_gaps_add_up(
    happened: list[tuple[str, set[int], int]],
) -> None:
    """Time in 64ths: sums of floats are exact."""
    counted, now = Counted(), 0.0
    requests = [request(str(number)) for number in range(6)]
    times: dict[int, list[float]] = {number: [] for number in range(6)}
    for what, numbers, ticks in happened:
        end = now + ticks / 64
        chosen = [n for n in sorted(numbers) if bool(times[n]) == (what == "decode")]
        if chosen:
            step = counted.decode if what == "decode" else counted.prompt
            step([requests[n] for n in chosen], now, end)
            for n in chosen:
                times[n].append(end)
        now = end

    gaps = [later - earlier for ends in times.values() for earlier, later in itertools.pairwise(ends)]
    kinds = counted.counters.snapshot().by_kind()
    assert kinds["prompt"].first_token.num == sum(map(bool, times.values()))
    assert kinds["prompt"].first_token.seconds == sum(ends[0] for ends in times.values() if ends)
    assert kinds["decode"].gaps == Total(len(gaps), sum(gaps))
    buckets = Counter(bisect_left(GAP_BOUNDS, gap) for gap in gaps)
    assert list(counted.counters.snapshot().gap_counts) == [buckets[i] for i in range(len(GAP_BOUNDS) + 1)]


def test_a_reader_never_sees_half_a_step() -> None:
    """Each step adds a token and a gap; whoever asks meanwhile sees both or none."""
    counted, one = Counted(), request()
    counted.prompt([one], 0.0, 0.0)
    is_done = threading.Event()
    wrong: list[EntryCounters] = []

    def read() -> None:
        while not is_done.is_set():
            counters_of_entry = counted.counters.snapshot().entries.get(DECODE, EntryCounters())
            if (
                not counters_of_entry.steps.num
                == counters_of_entry.work.num_tokens
                == counters_of_entry.gaps.num
            ):
                wrong.append(counters_of_entry)

    reader = threading.Thread(target=read)
    reader.start()
    step = decode_step(1)
    for number in range(2000):
        counted.counters.count(step, BLOCK_SIZE, [one], [one], (number, number + 1.0))
    is_done.set()
    reader.join()

    assert wrong == []
    assert counted.of(DECODE).steps.num == 2000


@pytest.mark.parametrize("num", [0, 1, 3])
def test_counters_add_up(num: int) -> None:
    one = EntryCounters(
        Total(1, 2.0), StepWork(1, 2, 3, 4), Total(1, 1.0), Total(2, 1.0), Total(3, 0.5), 6, 2
    )

    total = sum([one] * num, EntryCounters())

    assert total.steps == Total(num, 2.0 * num)
    assert total.work == StepWork(num, 2 * num, 3 * num, 4 * num)
    assert (total.num_prefix_tokens, total.num_cached_tokens) == (6 * num, 2 * num)


def test_the_work_of_a_prompt_step_is_its_new_tokens_and_their_contexts() -> None:
    rows = (PromptRow((1, 2, 3), 5, (1, 2), None), PromptRow((4,), 0, (3,), None))

    assert work_of(PromptStep(PromptEntry(4, 8, 3), rows), 4) == StepWork(4, 28, 2, 10)


def test_the_work_of_a_decode_step_is_a_token_a_row_and_all_blocks() -> None:
    rows = (DecodeRow(7, 5, (1, 2), GREEDY_ROW), DecodeRow(8, 0, (3,), GREEDY_ROW))

    assert work_of(DecodeStep(DecodeEntry(4, 1, 8), rows), 4) == StepWork(2, 2, 3, 5)
