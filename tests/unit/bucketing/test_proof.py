from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.proof import DecodeHole, PromptHole, ReachableSteps, prove_steps, uncovered
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.spec.bucketing import BucketingSpec
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.scheduler import SchedulerSpec
from tests.unit.bucketing.walks import all_prompts, schedulers

any_limits = st.builds(
    ServingLimits,
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 26),
    max_model_len=st.integers(2, 24),
    block_size=st.integers(1, 5),
    num_blocks=st.integers(1, 20),
)
prompt_entries = st.builds(PromptEntry, st.integers(1, 2), st.integers(1, 26), st.integers(0, 12))
decode_entries = st.builds(DecodeEntry, st.integers(1, 7), st.just(1), st.integers(1, 22))
tables = st.builds(
    BucketTable,
    st.lists(prompt_entries, max_size=8).map(tuple),
    st.lists(decode_entries, max_size=8).map(tuple),
)


def blocks_of(limits: ServingLimits, num_tokens: int) -> int:
    return -(-num_tokens // limits.block_size)


def all_decodes(limits: ServingLimits, *, contiguous_pa: bool) -> Iterator[tuple[int, int]]:
    for batch in range(1, min(limits.max_num_seqs, limits.num_blocks) + 1):
        own = limits.num_blocks if contiguous_pa else batch * blocks_of(limits, limits.max_model_len)
        for total in range(batch, min(limits.num_blocks, own) + 1):
            yield batch, total


def is_prompt_covered(limits: ServingLimits, table: BucketTable, query: int, context: int) -> bool:
    blocks = blocks_of(limits, context)
    return any(entry.query_len >= query and entry.num_ctx_blocks >= blocks for entry in table.prompt)


def is_decode_covered(table: BucketTable, batch: int, total: int) -> bool:
    return any(entry.batch_size >= batch and entry.num_blocks >= total for entry in table.decode)


@given(any_limits, tables, schedulers, st.booleans())
def test_uncovered_prompts_are_exactly_those_of_a_walk_over_all_queries_and_contexts(
    limits: ServingLimits, table: BucketTable, scheduler: SchedulerSpec, prefix_caching: bool
) -> None:
    bucketing = BucketingSpec(prefix_caching=prefix_caching)
    prompts = list(all_prompts(limits, bucketing, scheduler))
    walked = [step for step in prompts if not is_prompt_covered(limits, table, *step)]

    holes = [
        hole
        for hole in uncovered(ReachableSteps.of(limits, bucketing, scheduler), table)
        if isinstance(hole, PromptHole)
    ]
    found = [
        (query, context)
        for query, context in prompts
        for hole in holes
        if hole.first_ctx_blocks <= blocks_of(limits, context) <= hole.last_ctx_blocks
        if query > hole.covered_len
    ]

    assert found == walked
    assert sum(hole.num_cells for hole in holes) == len(
        {(blocks_of(limits, query), blocks_of(limits, context)) for query, context in walked}
    )


@given(any_limits, tables, st.booleans())
def test_uncovered_decodes_are_exactly_those_of_a_walk_over_all_batches_and_totals(
    limits: ServingLimits, table: BucketTable, contiguous_pa: bool
) -> None:
    steps = list(all_decodes(limits, contiguous_pa=contiguous_pa))
    walked = [step for step in steps if not is_decode_covered(table, *step)]

    holes = [
        h
        for h in uncovered(ReachableSteps.of(limits, BucketingSpec(contiguous_pa=contiguous_pa)), table)
        if isinstance(h, DecodeHole)
    ]
    found = [
        (batch, total)
        for batch, total in steps
        for hole in holes
        if hole.first_batch_size <= batch <= hole.last_batch_size and total > hole.covered_blocks
    ]

    assert found == walked
    assert sum(hole.num_steps for hole in holes) == len(walked)


@given(any_limits, tables, st.booleans())
def test_the_counterexample_is_the_smallest_step_of_a_walk(
    limits: ServingLimits, table: BucketTable, contiguous_pa: bool
) -> None:
    prompts = [
        (query + context, "prompt", (1, query, blocks_of(limits, context)))
        for query, context in all_prompts(limits, BucketingSpec(), SchedulerSpec())
        if not is_prompt_covered(limits, table, query, context)
    ]
    decodes = [
        (total * limits.block_size, "decode", (batch, 1, total))
        for batch, total in all_decodes(limits, contiguous_pa=contiguous_pa)
        if not is_decode_covered(table, batch, total)
    ]

    coverage = prove_steps(ReachableSteps.of(limits, BucketingSpec(contiguous_pa=contiguous_pa)), table)

    smallest = coverage.smallest
    found = None if smallest is None else (smallest.num_tokens, smallest.kind, smallest.shape)
    assert found == min([*prompts, *decodes], default=None)
    assert coverage.is_closed == (found is None)


@given(any_limits, tables)
def test_phases_count_what_a_walk_counts(limits: ServingLimits, table: BucketTable) -> None:
    prompt, decode = prove_steps(ReachableSteps.of(limits), table).phases

    cells = {
        tuple(blocks_of(limits, tokens) for tokens in step)
        for step in all_prompts(limits, BucketingSpec(), SchedulerSpec())
    }
    assert prompt.num_reachable == len(cells)
    assert decode.num_reachable == len(list(all_decodes(limits, contiguous_pa=False)))


@given(any_limits, tables)
def test_a_table_without_prompt_holes_lets_every_prompt_end(
    limits: ServingLimits, table: BucketTable
) -> None:
    """Plays the scheduler: chunks of whole blocks, or to the end, as long as covered, from every start."""
    if (
        limits.max_num_batched_tokens < limits.block_size
        or prove_steps(ReachableSteps.of(limits), table).phases[0].num_uncovered
    ):
        return
    for length in range(1, limits.max_model_len + 1):
        start = 0
        while start < length:
            longest = table.max_query_len(start // limits.block_size)
            step = min(longest, limits.max_num_batched_tokens, length - start)
            if start + step < length:
                step -= step % limits.block_size
            assert step > 0
            assert table.find_prompt(1, step, start // limits.block_size) is not None
            start += step


LIMITS = ServingLimits(
    max_num_seqs=2, max_num_batched_tokens=16, max_model_len=40, block_size=16, num_blocks=4
)


def test_holes_and_the_result_say_which_steps_they_are() -> None:
    table = BucketTable(
        (PromptEntry(1, 12, 2), PromptEntry(1, 16, 0)), (DecodeEntry(1, 1, 3), DecodeEntry(2, 1, 3))
    )

    assert [str(hole) for hole in uncovered(ReachableSteps.of(LIMITS), table)] == [
        "prompt chunks of more than 12 tokens after 1 to 2 context blocks",
        "prompt chunks of any length after 3 context blocks",
        "decodes of 2 sequences over more than 3 blocks",
    ]
    assert str(prove_steps(ReachableSteps.of(LIMITS), table)) == (
        "no entry for 3 of 4 prompt cells, 1 of 6 decode steps;"
        " the smallest: a prompt chunk of 13 tokens after 1 token (1 block), 14 in all"
    )


def test_an_empty_table_covers_nothing() -> None:
    coverage = prove_steps(ReachableSteps.of(LIMITS), BucketTable((), ()))

    assert [str(hole) for hole in uncovered(ReachableSteps.of(LIMITS), BucketTable((), ()))] == [
        "prompt chunks of any length after 0 to 3 context blocks",
        "decodes of 1 to 2 sequences over any number of blocks",
    ]
    assert [(phase.num_reachable, phase.num_uncovered) for phase in coverage.phases] == [(4, 4), (6, 6)]
    assert str(coverage.smallest) == "a prompt chunk of 1 token"


def test_one_entry_of_the_largest_sizes_covers_all() -> None:
    table = BucketTable((PromptEntry(1, 16, 3),), (DecodeEntry(2, 1, 4),))

    assert str(prove_steps(ReachableSteps.of(LIMITS), table)) == "every step that can be formed has an entry"
    assert list(uncovered(ReachableSteps.of(LIMITS), table)) == []


def test_a_context_that_ends_inside_a_block_is_a_step_of_its_own() -> None:
    """After 33 tokens there are 3 context blocks, although no chunk of whole blocks leads there."""
    table = BucketTable((PromptEntry(1, 16, 2),), (DecodeEntry(2, 1, 4),))

    assert (
        str(prove_steps(ReachableSteps.of(LIMITS), table).smallest)
        == "a prompt chunk of 1 token after 33 tokens (3 blocks), 34 in all"
    )


def test_contiguous_blocks_reach_the_last_block_with_one_sequence() -> None:
    table = BucketTable((PromptEntry(1, 16, 3),), (DecodeEntry(1, 1, 3), DecodeEntry(2, 1, 4)))

    assert prove_steps(ReachableSteps.of(LIMITS), table).is_closed
    two_of_two = LIMITS.model_copy(update={"num_blocks": 5})
    assert [
        str(hole)
        for hole in uncovered(ReachableSteps.of(two_of_two, BucketingSpec(contiguous_pa=True)), table)
    ] == ["decodes of 1 to 2 sequences over more than 4 blocks"]
