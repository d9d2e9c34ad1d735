"""What the coverage proof promises, against the scheduler: with a closed table every request ends.

And the proof looks at no fewer steps than the scheduler forms.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.proof import ReachableSteps, closing_entries
from aotgaudi.bucketing.reachable import ReachableDecodes, ReachablePrompts
from aotgaudi.engine.steps import PromptStep
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.spec.bucketing import BucketingSpec
from aotgaudi.spec.limits import ServingLimits
from tests.driving import asked_tokens, served, serving_limits


@st.composite
def closed_tables(draw: st.DrawFn, limits: ServingLimits) -> BucketTable:
    """A few entries of any size, and what closes them."""
    prompts = st.builds(PromptEntry, st.integers(1, 3), st.integers(1, 20), st.integers(0, 12))
    decodes = st.builds(DecodeEntry, st.integers(1, 5), st.just(1), st.integers(1, 14))
    table = BucketTable.from_entries(draw(st.lists(st.one_of(prompts, decodes), max_size=5)))
    bucketing = BucketingSpec(max_padding=draw(st.sampled_from([1.0, 2.0, 10.0])))
    added = closing_entries(ReachableSteps.of(limits), bucketing, table)
    return BucketTable.from_entries((*table.prompt, *table.decode, *added))


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
