from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.padding import decode_padding, prompt_padding
from aotgaudi.bucketing.proof import Addition, ReachableSteps, close, closing_entries, prove_steps
from aotgaudi.bucketing.reachable import ReachableDecodes, ReachablePrompts
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.spec.bucketing import BucketingSpec
from aotgaudi.spec.limits import LARGEST_LIMIT, ServingLimits
from aotgaudi.spec.scheduler import SchedulerSpec
from tests.specs import limits_of
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


@given(any_limits, tables, bucketings, schedulers)
def test_the_additions_close_every_table(
    limits: ServingLimits, table: BucketTable, bucketing: BucketingSpec, scheduler: SchedulerSpec
) -> None:
    additions = close(ReachableSteps.of(limits, bucketing, scheduler), bucketing.max_padding, table)

    closed = with_added(table, additions)
    assert prove_steps(ReachableSteps.of(limits, bucketing, scheduler), closed).is_closed
    assert close(ReachableSteps.of(limits, bucketing, scheduler), bucketing.max_padding, closed) == ()


@settings(max_examples=60, deadline=None)
@given(any_limits, tables, bucketings, schedulers)
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


@given(any_limits, tables, bucketings, schedulers)
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


@given(any_limits, tables, bucketings, schedulers)
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


@given(any_limits, tables, bucketings, schedulers)
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


LIMITS = limits_of(max_num_batched_tokens=64)


def test_a_table_that_lacks_long_contexts_gets_one_entry_an_octave() -> None:
    table = BucketTable((PromptEntry(1, 64, 0), PromptEntry(1, 16, 8)), (DecodeEntry(2, 1, 16),))

    additions = close(ReachableSteps.of(LIMITS), 2.0, table)

    assert additions == (Addition(PromptEntry(1, 64, 7), (1, 63, 5)),)
    assert close(ReachableSteps.of(LIMITS), 1.0, table) == (
        Addition(PromptEntry(1, 32, 7), (1, 31, 7)),
        Addition(PromptEntry(1, 48, 6), (1, 47, 6)),
        Addition(PromptEntry(1, 64, 5), (1, 63, 5)),
    )


def test_a_missing_decode_is_closed_by_one_entry_for_the_largest_step() -> None:
    table = BucketTable((PromptEntry(1, 64, 8),), (DecodeEntry(1, 1, 2), DecodeEntry(2, 1, 9)))

    assert close(ReachableSteps.of(LIMITS), 2.0, table) == (Addition(DecodeEntry(2, 1, 16), (2, 1, 10)),)
    assert close(ReachableSteps.of(LIMITS, BucketingSpec(contiguous_pa=True)), 2.0, table) == (
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
    assert closing_entries(ReachableSteps.of(LIMITS, bucketing), bucketing, BucketTable((), ())) == ()
