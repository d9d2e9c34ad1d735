"""What the coverage proof promises, against the scheduler: with a closed table every request ends.

And the proof looks at no fewer steps than the scheduler forms.
"""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from aotgaudi.bucketing.closure import closing_entries
from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.proof import ReachableSteps
from aotgaudi.bucketing.reachable import ReachableDecodes, ReachablePrompts
from aotgaudi.engine.admission import resolve_max_tokens
from aotgaudi.engine.blocks import BlockPool
from aotgaudi.engine.request import Request
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.engine.scheduler import Scheduler
from aotgaudi.engine.steps import PromptStep, Step
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.errors import RequestError
from aotgaudi.spec.bucketing import BucketingSpec
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.scheduler import Policy


@st.composite
def serving_limits(draw: st.DrawFn) -> ServingLimits:
    block_size = draw(st.integers(1, 4))
    max_num_seqs = draw(st.integers(1, 5))
    return ServingLimits(
        max_num_seqs=max_num_seqs,
        max_num_prefill_seqs=draw(st.integers(1, max_num_seqs)),
        max_num_batched_tokens=draw(st.integers(block_size, 20)),
        max_model_len=draw(st.integers(2, 24)),
        block_size=block_size,
        num_blocks=draw(st.integers(2, 14)),
    )


@st.composite
def closed_tables(draw: st.DrawFn, limits: ServingLimits) -> BucketTable:
    """A few entries of any size, and what closes them."""
    prompts = st.builds(PromptEntry, st.integers(1, 3), st.integers(1, 20), st.integers(0, 12))
    decodes = st.builds(DecodeEntry, st.integers(1, 5), st.just(1), st.integers(1, 14))
    table = BucketTable.from_entries(draw(st.lists(st.one_of(prompts, decodes), max_size=5)))
    bucketing = BucketingSpec(max_padding=draw(st.sampled_from([1.0, 2.0, 10.0])))
    added = closing_entries(ReachableSteps.of(limits), bucketing, table)
    return BucketTable.from_entries((*table.prompt, *table.decode, *added))


asked_tokens = st.lists(
    st.tuples(st.integers(1, 23), st.one_of(st.none(), st.integers(1, 23))), min_size=1, max_size=6
)


def served(
    limits: ServingLimits,
    table: BucketTable,
    asked: list[tuple[int, int | None]],
    policy: Policy,
    prefix_caching: bool,
) -> Iterator[Step]:
    """Yields the steps in which all that is admitted is served to its end. Decode steps take as long as 4 tokens."""
    pool = BlockPool(limits.num_blocks)
    scheduler = Scheduler(limits, table, pool, policy=policy, prefix_caching=prefix_caching)
    for index, (num_prompt_tokens, max_tokens) in enumerate(asked):
        params = SamplingParams(max_tokens=max_tokens)
        try:
            resolved = resolve_max_tokens(num_prompt_tokens, params, limits)
        except RequestError:
            continue
        scheduler.add(
            Request(
                request_id=f"r{index}",
                prompt_token_ids=(1,) * num_prompt_tokens,
                params=params,
                max_tokens=resolved,
                seed=0,
            )
        )
    while (scheduled := scheduler.schedule()) is not None:
        yield scheduled.step
        entry = scheduled.step.entry
        scheduler.observe(entry, entry.query_len if isinstance(entry, PromptEntry) else 4.0)
        scheduler.complete(scheduled, [None if row.sampling is None else 2 for row in scheduled.step.rows])
    assert not scheduler.has_work


@settings(deadline=None)
@given(limits=serving_limits(), data=st.data(), asked=asked_tokens)
def test_with_a_closed_table_every_request_ends_and_every_step_is_one_that_the_proof_looked_at(
    limits: ServingLimits, data: st.DataObject, asked: list[tuple[int, int | None]]
) -> None:
    table = data.draw(closed_tables(limits))
    policy = data.draw(st.sampled_from(["latency", "throughput"]))
    prompts, decodes = ReachablePrompts(limits), ReachableDecodes(limits)

    for step in served(limits, table, asked, policy, data.draw(st.booleans())):
        if isinstance(step, PromptStep):
            for row in step.rows:
                assert row.start + len(row.token_ids) <= limits.max_model_len
                assert len(row.token_ids) <= prompts.longest_query(-(-row.start // limits.block_size))
                assert -(-row.start // limits.block_size) <= step.entry.num_ctx_blocks
                assert len(row.token_ids) <= step.entry.query_len
        else:
            total = sum(len(row.block_table) for row in step.rows)
            assert len(step.rows) <= decodes.max_batch_size
            assert len(step.rows) <= total
            assert len(step.rows) <= step.entry.batch_size
            assert total <= step.entry.num_blocks
            held = {block for row in step.rows for block in row.block_table}
            assert len(held) <= decodes.most_blocks(len(step.rows))
