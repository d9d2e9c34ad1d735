"""Replays a trace: which steps run, in which entries, and which requests fit the limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.proof import ReachableSteps, prove_steps
from aotgaudi.entries import DecodeEntry, PromptEntry, StepEntry
from aotgaudi.errors import SpecError
from aotgaudi.manifest.enumerate import enumerate_entries
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.traffic.replay import Clients, replay
from aotgaudi.traffic.trace import Trace
from tests.specs import spec_of

LIMITS = ServingLimits(
    max_num_seqs=6,
    max_num_prefill_seqs=2,
    max_num_batched_tokens=16,
    max_model_len=40,
    block_size=4,
    num_blocks=24,
)
TABLE = BucketTable.from_entries(enumerate_entries(spec_of(limits=LIMITS.model_dump(exclude_defaults=True))))

requests = st.tuples(st.integers(0, 40), st.integers(1, 45), st.integers(0, 45))
traces = st.lists(requests, min_size=1, max_size=25).map(
    lambda rows: Trace(*map(tuple, zip(*sorted(rows), strict=True)))  # type: ignore[arg-type]
)


def seconds_of(entry: StepEntry) -> float:
    return sum(entry.row()) / 64


def test_requests_are_preempted_when_blocks_run_out() -> None:
    trace = Trace((0.0,) * 8, (8,) * 8, (30,) * 8)

    assert replay(trace, LIMITS, TABLE, seconds_of).num_preemptions > 0


@given(traces)
def test_every_token_of_the_requests_that_fit_is_computed(trace: Trace) -> None:
    if min(trace.prompt_tokens) >= 40:
        return
    limits = LIMITS.model_copy(update={"num_blocks": 400, "max_num_prefill_seqs": 1})

    replayed = replay(trace, limits, TABLE, seconds_of)

    prompts = sum(
        needs.query_len * count for needs, count in replayed.needs.items() if isinstance(needs, PromptEntry)
    )
    decodes = sum(
        needs.batch_size * count for needs, count in replayed.needs.items() if isinstance(needs, DecodeEntry)
    )
    assert replayed.num_preemptions == 0
    clients = Clients.of(trace, limits)
    assert (
        prompts == sum(clients.prompt_tokens) == sum(tokens for tokens in trace.prompt_tokens if tokens < 40)
    )
    assert decodes == sum(clients.max_tokens) - replayed.num_requests
    for needs, entry in replayed.steps:
        assert all(least <= most for least, most in zip(needs.row(), entry.row(), strict=True))


def test_requests_that_do_not_fit_are_counted() -> None:
    trace = Trace((0.0, 0.0, 1.0), (39, 40, 10), (5, 5, 31))

    replayed = replay(trace, LIMITS, TABLE, seconds_of)

    assert (replayed.num_requests, replayed.num_refused, replayed.num_shortened) == (2, 1, 2)
    assert list(Clients.of(trace, LIMITS).max_tokens) == [1, 30]


def test_a_trace_of_which_nothing_fits_is_refused() -> None:
    with pytest.raises(SpecError, match="no prompt that fits: the shortest has 50 tokens"):
        replay(Trace((0.0,), (50,), (1,)), LIMITS, TABLE, seconds_of)


def test_time_passes_while_nobody_asks_for_anything() -> None:
    replayed = replay(Trace((0.0, 100.0), (4, 4), (1, 1)), LIMITS, TABLE, seconds_of)

    assert 100 < replayed.seconds < 101


def test_the_table_of_these_tests_is_closed() -> None:
    assert prove_steps(ReachableSteps.of(LIMITS), TABLE).is_closed
