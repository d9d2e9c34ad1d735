from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.entries import DecodeEntry, DefragEntry, PromptEntry

small = st.integers(1, 6)
tables = st.builds(
    BucketTable,
    st.lists(st.builds(PromptEntry, small, small, st.integers(0, 6)), max_size=12).map(tuple),
    st.lists(st.builds(DecodeEntry, small, st.just(1), small), max_size=12).map(tuple),
)


def prompt_cost(entry: PromptEntry) -> tuple[int, int, PromptEntry]:
    return entry.batch_size * entry.query_len, entry.batch_size * entry.num_ctx_blocks, entry


def test_table_is_made_of_the_prompt_and_decode_entries_of_a_manifest() -> None:
    entries = (PromptEntry(1, 16, 0), DecodeEntry(1, 1, 1), DefragEntry(8))

    assert BucketTable.from_entries(entries) == BucketTable(entries[:1], entries[1:2])


@given(tables, st.integers(0, 7), st.integers(0, 7), st.integers(0, 7))
def test_prompt_look_up_equals_a_search_of_all_entries(
    table: BucketTable, batch: int, query: int, context: int
) -> None:
    covering = [
        entry
        for entry in table.prompt
        if entry.batch_size >= batch and entry.query_len >= query and entry.num_ctx_blocks >= context
    ]

    assert table.find_prompt(batch, query, context) == min(covering, key=prompt_cost, default=None)


@given(tables, st.integers(0, 7), st.integers(0, 7))
def test_decode_look_up_equals_a_search_of_all_entries(table: BucketTable, batch: int, blocks: int) -> None:
    covering = [e for e in table.decode if e.batch_size >= batch and e.num_blocks >= blocks]

    best = min(covering, key=lambda e: (e.num_blocks, e.batch_size), default=None)
    assert table.find_decode(batch, blocks) == best


@given(tables, st.integers(0, 7), st.integers(1, 7))
def test_longest_query_equals_a_search_of_all_entries(table: BucketTable, context: int, batch: int) -> None:
    covering = [e.query_len for e in table.prompt if e.batch_size >= batch and e.num_ctx_blocks >= context]

    assert table.max_query_len(context, batch) == max(covering, default=0)
