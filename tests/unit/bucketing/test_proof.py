"""The proof against a walk over every step, and the fewest entries that close a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.padding import decode_padding, prompt_padding
from aotgaudi.bucketing.proof import (
    Addition,
    DecodeHole,
    PromptHole,
    ReachableSteps,
    close,
    closing_entries,
    prove_steps,
    uncovered,
)
from aotgaudi.bucketing.reachable import ReachableDecodes, ReachablePrompts
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.spec.bucketing import BucketingSpec
from aotgaudi.spec.limits import LARGEST_LIMIT, ServingLimits
from aotgaudi.spec.scheduler import SchedulerSpec
from tests.specs import limits_of
from tests.unit.bucketing.walks import (
    all_prompts,
    any_limits,
    decode_entries,
    prompt_entries,
    schedulers,
    tables,
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


tables_to_close = st.builds(
    BucketTable,
    st.lists(prompt_entries, max_size=6).map(tuple),
    st.lists(decode_entries, max_size=6).map(tuple),
)
bucketings = st.builds(
    BucketingSpec, max_padding=st.sampled_from([1.0, 1.2, 1.5, 2.0, 3.7, 1e6]), contiguous_pa=st.booleans()
)


def ratio_of(bucketing: BucketingSpec) -> Fraction:
    return Fraction(str(bucketing.max_padding))


def with_added(table: BucketTable, additions: tuple[Addition, ...]) -> BucketTable:
    return BucketTable.from_entries(
        (*table.prompt, *table.decode, *(addition.entry for addition in additions))
    )


def rows_with_holes(
    limits: ServingLimits, table: BucketTable, prompts: Iterable[tuple[int, int]]
) -> set[int]:
    """The longest queries of the rows that have an uncovered step, by a walk over all steps."""
    rows = set()
    for query, context in prompts:
        if table.find_prompt(1, query, -(-context // limits.block_size)) is None:
            longest = -(-query // limits.block_size) * limits.block_size
            rows.add(min(longest, limits.max_num_batched_tokens, limits.max_model_len))
    return rows


def fewest(limits: ServingLimits, rows: set[int], max_padding: Fraction) -> int:
    """The fewest query lengths of which each row has an admissible one, by trying all sets of all lengths."""
    lengths = range(1, min(limits.max_num_batched_tokens, limits.max_model_len) + 1)
    covers = {frozenset(row for row in rows if row <= length <= max_padding * row) for length in lengths}
    for count in range(len(rows) + 1):
        if any(frozenset().union(*chosen) == rows for chosen in combinations(covers, count)):
            return count
    raise AssertionError("each row's own length is admissible")


@given(any_limits, tables_to_close, bucketings, schedulers)
def test_the_additions_close_every_table(
    limits: ServingLimits, table: BucketTable, bucketing: BucketingSpec, scheduler: SchedulerSpec
) -> None:
    additions = close(ReachableSteps.of(limits, bucketing, scheduler), bucketing.max_padding, table)

    closed = with_added(table, additions)
    assert prove_steps(ReachableSteps.of(limits, bucketing, scheduler), closed).is_closed
    assert close(ReachableSteps.of(limits, bucketing, scheduler), bucketing.max_padding, closed) == ()


@settings(max_examples=60, deadline=None)
@given(any_limits, tables_to_close, bucketings, schedulers)
def test_no_set_of_admissible_prompt_entries_is_smaller(
    limits: ServingLimits, table: BucketTable, bucketing: BucketingSpec, scheduler: SchedulerSpec
) -> None:
    prompts = [
        a
        for a in close(ReachableSteps.of(limits, bucketing, scheduler), bucketing.max_padding, table)
        if isinstance(a.entry, PromptEntry)
    ]

    assert len(prompts) == fewest(
        limits, rows_with_holes(limits, table, all_prompts(limits, bucketing, scheduler)), ratio_of(bucketing)
    )


@given(any_limits, tables_to_close, bucketings, schedulers)
def test_witnesses_are_uncovered_and_no_admissible_entry_covers_two(
    limits: ServingLimits, table: BucketTable, bucketing: BucketingSpec, scheduler: SchedulerSpec
) -> None:
    additions = close(ReachableSteps.of(limits, bucketing, scheduler), bucketing.max_padding, table)

    prompts = [a for a in additions if isinstance(a.entry, PromptEntry)]
    for addition in prompts:
        _, query, context = addition.witness
        assert table.find_prompt(1, query, context) is None
        assert query + max(0, (context - 1) * limits.block_size + 1 if context else 0) <= limits.max_model_len
        assert addition.entry.query_len >= query
    rows = sorted(-(-a.witness[1] // limits.block_size) * limits.block_size for a in prompts)
    for shorter, longer in pairwise(rows):
        longest = min(longer, limits.max_num_batched_tokens, limits.max_model_len)
        assert longest > ratio_of(bucketing) * shorter
    for addition in additions:
        if isinstance(addition.entry, DecodeEntry):
            assert table.find_decode(addition.witness[0], addition.witness[2]) is None


@given(any_limits, tables_to_close, bucketings, schedulers)
def test_every_uncovered_step_gets_an_entry_that_is_not_too_long_for_it(
    limits: ServingLimits, table: BucketTable, bucketing: BucketingSpec, scheduler: SchedulerSpec
) -> None:
    added = [
        a.entry
        for a in close(ReachableSteps.of(limits, bucketing, scheduler), bucketing.max_padding, table)
        if isinstance(a.entry, PromptEntry)
    ]

    for query, context in all_prompts(limits, bucketing, scheduler):
        row = -(-query // limits.block_size) * limits.block_size
        row = min(row, limits.max_num_batched_tokens, limits.max_model_len)
        blocks = -(-context // limits.block_size)
        if table.find_prompt(1, query, blocks) is None:
            assert any(
                row <= entry.query_len <= ratio_of(bucketing) * row and entry.num_ctx_blocks >= blocks
                for entry in added
            )


@given(any_limits, tables_to_close, bucketings, schedulers)
def test_additions_are_new_ascending_within_the_limits_and_at_most_one_decode(
    limits: ServingLimits, table: BucketTable, bucketing: BucketingSpec, scheduler: SchedulerSpec
) -> None:
    added = closing_entries(ReachableSteps.of(limits, bucketing, scheduler), bucketing, table)

    prompts = [entry for entry in added if isinstance(entry, PromptEntry)]
    decodes = [entry for entry in added if isinstance(entry, DecodeEntry)]
    assert [*prompts, *decodes] == list(added)
    assert prompts == sorted(set(prompts))
    assert not set(added) & {*table.prompt, *table.decode}
    assert len(decodes) <= 1
    longest = min(limits.max_num_batched_tokens, limits.max_model_len)
    for entry in prompts:
        assert entry.query_len == longest or entry.query_len % limits.block_size == 0
        assert entry.query_len <= longest
        assert entry.num_ctx_blocks * limits.block_size < limits.max_model_len + limits.block_size - 1
    for entry in decodes:
        assert entry.batch_size <= limits.max_num_seqs
        assert entry.num_blocks <= limits.num_blocks


SMALL_LIMITS = limits_of(max_num_batched_tokens=64)


def test_a_table_that_lacks_long_contexts_gets_one_entry_an_octave() -> None:
    table = BucketTable((PromptEntry(1, 64, 0), PromptEntry(1, 16, 8)), (DecodeEntry(2, 1, 16),))

    additions = close(ReachableSteps.of(SMALL_LIMITS), 2.0, table)

    assert additions == (Addition(PromptEntry(1, 64, 7), (1, 63, 5)),)
    assert close(ReachableSteps.of(SMALL_LIMITS), 1.0, table) == (
        Addition(PromptEntry(1, 32, 7), (1, 31, 7)),
        Addition(PromptEntry(1, 48, 6), (1, 47, 6)),
        Addition(PromptEntry(1, 64, 5), (1, 63, 5)),
    )


def test_a_missing_decode_is_closed_by_one_entry_for_the_largest_step() -> None:
    table = BucketTable((PromptEntry(1, 64, 8),), (DecodeEntry(1, 1, 2), DecodeEntry(2, 1, 9)))

    assert close(ReachableSteps.of(SMALL_LIMITS), 2.0, table) == (
        Addition(DecodeEntry(2, 1, 16), (2, 1, 10)),
    )
    assert close(ReachableSteps.of(SMALL_LIMITS, BucketingSpec(contiguous_pa=True)), 2.0, table) == (
        Addition(DecodeEntry(2, 1, 24), (1, 1, 10)),
    )


def test_the_largest_limits_are_proved_closed_and_measured_without_a_walk() -> None:
    limits = ServingLimits(
        max_num_seqs=LARGEST_LIMIT,
        max_num_batched_tokens=LARGEST_LIMIT,
        max_model_len=LARGEST_LIMIT,
        block_size=1,
        num_blocks=LARGEST_LIMIT,
    )
    table = BucketTable((PromptEntry(1, 1, 0),), (DecodeEntry(1, 1, 1),))

    additions = close(ReachableSteps.of(limits), 2.0, table)

    closed = with_added(table, additions)
    assert len(additions) == 31 + 1
    assert prove_steps(ReachableSteps.of(limits), closed).is_closed
    prompt, decode = (
        prompt_padding(ReachablePrompts(limits), closed),
        decode_padding(ReachableDecodes(limits), closed),
    )
    assert prompt is not None
    assert prompt.is_sampled
    assert decode is not None
    assert decode.is_sampled


@pytest.mark.parametrize(
    "bucketing",
    [BucketingSpec(coverage="upstream"), BucketingSpec(strategy="unified", version="vllm-gaudi@v0.14.1")],
)
def test_upstream_tables_and_unified_ones_are_left_alone(bucketing: BucketingSpec) -> None:
    assert closing_entries(ReachableSteps.of(SMALL_LIMITS, bucketing), bucketing, BucketTable((), ())) == ()
