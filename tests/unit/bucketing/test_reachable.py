from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.reachable import ReachableDecodes, ReachablePrompts
from aotgaudi.spec.bucketing import BucketingSpec
from aotgaudi.spec.limits import LARGEST_LIMIT, ServingLimits
from aotgaudi.spec.scheduler import SchedulerSpec
from tests.unit.bucketing.walks import all_prompts, any_limits, schedulers


@given(any_limits, schedulers, st.booleans())
def test_cells_are_those_of_a_walk_over_all_queries_and_contexts(
    limits: ServingLimits, scheduler: SchedulerSpec, prefix_caching: bool
) -> None:
    bucketing = BucketingSpec(prefix_caching=prefix_caching)
    longest: dict[tuple[int, int], int] = {}
    for query, context in all_prompts(limits, bucketing, scheduler):
        cell = -(-query // limits.block_size), -(-context // limits.block_size)
        longest[cell] = max(query, longest.get(cell, 0))

    reachable = ReachablePrompts.of(limits, bucketing, scheduler)

    assert reachable.num_cells == len(longest)
    assert reachable.num_rows == max(row for row, _ in longest)
    assert reachable.max_ctx_blocks == max(context for _, context in longest)
    for (row, context), query in longest.items():
        assert query == min(reachable.row_query(row), reachable.longest_query(context))
        assert reachable.row_of(query) == row
        assert reachable.longest_context(query) >= context
        assert reachable.longest_query(context) + reachable.shortest_context(context) <= limits.max_model_len


@given(any_limits, st.booleans(), st.integers(0, 12))
def test_decode_steps_are_those_of_a_walk(limits: ServingLimits, contiguous_pa: bool, floor: int) -> None:
    own = -(-limits.max_model_len // limits.block_size)
    walk = {
        batch: range(batch, (limits.num_blocks if contiguous_pa else min(limits.num_blocks, batch * own)) + 1)
        for batch in range(1, min(limits.max_num_seqs, limits.num_blocks) + 1)
    }

    reachable = ReachableDecodes(limits, contiguous_pa)
    above = [batch for batch, totals in walk.items() if totals[-1] > floor]

    assert reachable.num_steps == sum(map(len, walk.values()))
    expected = sum(total > floor for batch in above for total in walk[batch])
    assert reachable.steps_above(floor, 1, reachable.max_batch_size) == expected
    if above:
        assert above == list(range(max(1, reachable.smallest_batch(floor + 1)), reachable.max_batch_size + 1))
        assert reachable.steps_above(floor, above[0], above[-1]) == expected


def test_the_largest_limits_are_counted_at_once() -> None:
    limits = ServingLimits(
        max_num_seqs=LARGEST_LIMIT,
        max_num_batched_tokens=LARGEST_LIMIT,
        max_model_len=LARGEST_LIMIT,
        block_size=1,
        num_blocks=LARGEST_LIMIT,
    )

    assert ReachablePrompts(limits).num_cells == LARGEST_LIMIT * (LARGEST_LIMIT + 1) // 2
    assert ReachableDecodes(limits).num_steps == LARGEST_LIMIT * (LARGEST_LIMIT + 1) // 2
