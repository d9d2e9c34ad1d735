"""Prompts and decodes take turns as the policy says: nobody waits longer than that, whatever comes."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.proof import ReachableSteps, closing_entries
from aotgaudi.engine.blocks import BlockPool
from aotgaudi.engine.scheduler import Scheduled, Scheduler
from aotgaudi.engine.steps import PromptStep
from aotgaudi.entries import DecodeEntry, Entry, PromptEntry
from aotgaudi.spec.bucketing import BucketingSpec
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.policy import Policy
from tests.driving import request_of, serving_limits


def seconds_of(entry: Entry) -> float:
    """What a step takes: as long as reading all weights, or computing its tokens, whichever is longer."""
    if isinstance(entry, PromptEntry):
        return max(8.0, entry.num_tokens)
    assert isinstance(entry, DecodeEntry)
    return 8.0 + entry.batch_size


@dataclass(frozen=True)
class Observed:
    """One step, how many requests decoded when it was formed, and the time budget of a prompt step."""

    scheduled: Scheduled
    num_decoding: int
    budget: float | None

    @property
    def is_prompt(self) -> bool:
        return isinstance(self.scheduled.step, PromptStep)


turn_limits = serving_limits(
    most_seqs=6, most_per_block=16, most_tokens=64, most_len=96, num_blocks=st.just(96)
)


@st.composite
def closed_tables(draw: st.DrawFn, limits: ServingLimits) -> BucketTable:
    """Short and long queries, several rows, and what closes the table."""
    lengths = st.sampled_from([1, 2, 4, 8, 16, 32, 64])
    prompts = st.builds(PromptEntry, st.integers(1, 3), lengths, st.integers(0, limits.max_blocks_per_seq))
    table = BucketTable(tuple(draw(st.lists(prompts, max_size=8))), ())
    added = closing_entries(ReachableSteps.of(limits), BucketingSpec(), table)
    return BucketTable.from_entries((*table.prompt, *added))


arrivals = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 95), st.integers(1, 20)), max_size=12)
"""Steps before it comes, tokens of its prompt, tokens that it asks for."""


def observed(
    limits: ServingLimits,
    table: BucketTable,
    asked: list[tuple[int, int, int]],
    policy: Policy,
    *,
    prefix_caching: bool = True,
) -> list[Observed]:
    """Serves all to their ends; returns what was seen. All prompts begin alike."""
    pool = BlockPool(limits.num_blocks)
    scheduler = Scheduler(limits, table, pool, policy=policy, prefix_caching=prefix_caching)
    to_come, seen = list(asked), []
    while to_come or scheduler.has_work:
        while to_come and to_come[0][0] <= len(seen):
            _, num_prompt, num_output = to_come.pop(0)
            num_prompt = min(num_prompt, limits.max_model_len - 1)
            scheduler.add(
                request_of(
                    range(num_prompt),
                    min(num_output, limits.max_model_len - num_prompt),
                    name=f"r{len(to_come)}",
                )
            )
        num_decoding = sum(request.is_prefilled for request in scheduler.running)
        budget = scheduler._step_budget([one for one in scheduler.running if not one.is_prefilled])
        scheduled = scheduler.schedule()
        if scheduled is None:
            to_come = [(0, *rest) for _, *rest in to_come]  # type: ignore[misc]
            continue
        seen.append(Observed(scheduled, num_decoding, budget))
        scheduler.observe(scheduled.step.entry, seconds_of(scheduled.step.entry))
        answer = [None if row.sampling is None else 500 + len(seen) for row in scheduled.step.rows]
        scheduler.complete(scheduled, answer)
        scheduler.check_integrity()
        assert len(seen) < 5000, "somebody starves"
    assert scheduler.pool.num_free == limits.num_blocks
    return seen


@settings(deadline=None)
@given(limits=turn_limits, data=st.data(), asked=arrivals, policy=st.sampled_from(["latency", "throughput"]))
def test_who_decodes_waits_for_a_bounded_number_of_prompt_steps(
    limits: ServingLimits, data: st.DataObject, asked: list[tuple[int, int, int]], policy: Policy
) -> None:
    most = 1 if policy == "latency" else limits.max_num_seqs
    in_a_row = 0

    for each in observed(limits, data.draw(closed_tables(limits)), asked, policy):
        in_a_row = in_a_row + 1 if each.is_prompt and each.num_decoding else 0
        assert in_a_row <= most


@settings(deadline=None)
@given(limits=turn_limits, data=st.data(), asked=arrivals)
def test_chunks_beside_decodes_take_no_longer_than_allowed(
    limits: ServingLimits, data: st.DataObject, asked: list[tuple[int, int, int]]
) -> None:
    """But for what the smallest entry takes, and for trying each size once: then it is known what it takes."""
    table = data.draw(closed_tables(limits))
    tried: set[tuple[int, int]] = set()

    for each in observed(limits, table, asked, "latency"):
        entry = each.scheduled.step.entry
        if not isinstance(entry, PromptEntry):
            continue
        size = (entry.batch_size, entry.query_len)
        is_too_long = each.budget is not None and seconds_of(entry) > each.budget
        if is_too_long and size in tried:
            assert isinstance(each.scheduled.step, PromptStep)
            (row,) = each.scheduled.step.rows
            smallest = table.find_prompt(1, 1, -(-row.start // limits.block_size))
            assert smallest is not None
            assert seconds_of(entry) <= seconds_of(smallest)
        tried.add(size)


def test_with_short_entries_no_token_comes_later_than_two_steps_of_everybody() -> None:
    """A steady crowd of writers while prompts arrive: each gap is at most twice a decode step, once sizes are known."""
    limits = ServingLimits(
        max_num_seqs=8,
        max_num_batched_tokens=256,
        max_model_len=512,
        block_size=64,
        num_blocks=64,
    )
    prompts = tuple(PromptEntry(1, query, ctx) for query in (8, 16, 64, 256) for ctx in (0, 8))
    table = BucketTable(prompts, (DecodeEntry(8, 1, 64),))
    asked = [(0, 8, 400)] * 4 + [(40 + 60 * i, 200, 4) for i in range(8)]

    steps = observed(limits, table, asked, "latency", prefix_caching=False)

    decoding = [each for each in steps if each.num_decoding >= 4]
    gaps, gap = [], 0.0
    for each in decoding[60:]:
        gap += seconds_of(each.scheduled.step.entry)
        if not each.is_prompt:
            gaps.append(gap)
            gap = 0.0
    decode = seconds_of(table.decode[0])
    assert len(gaps) > 200
    assert max(gaps) <= 2 * decode
    assert sum(each.is_prompt for each in decoding) > 8 * 8
