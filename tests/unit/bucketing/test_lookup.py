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


def test_least_padding_wins_over_the_lexicographically_first() -> None:
    table = BucketTable((PromptEntry(1, 512, 0), PromptEntry(2, 128, 0), PromptEntry(1, 256, 0)), ())

    assert table.find_prompt(1, 100, 0) == PromptEntry(1, 256, 0)
    assert table.find_prompt(2, 100, 0) == PromptEntry(2, 128, 0)
    assert table.find_prompt(1, 300, 0) == PromptEntry(1, 512, 0)


def test_fewer_padded_tokens_win_over_less_context() -> None:
    table = BucketTable((PromptEntry(1, 128, 63), PromptEntry(1, 256, 8)), ())

    assert table.find_prompt(1, 128, 5) == PromptEntry(1, 128, 63)


def test_decode_prefers_fewer_blocks_then_fewer_rows() -> None:
    table = BucketTable((), (DecodeEntry(4, 1, 8), DecodeEntry(2, 1, 8), DecodeEntry(1, 1, 16)))

    assert table.find_decode(1, 5) == DecodeEntry(2, 1, 8)
    assert table.find_decode(1, 9) == DecodeEntry(1, 1, 16)
    assert table.find_decode(3, 9) is None


def test_an_empty_table_covers_nothing() -> None:
    table = BucketTable((), ())

    assert table.find_prompt(1, 1, 0) is None
    assert table.find_decode(1, 1) is None
    assert table.max_query_len(0) == 0


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


@given(tables)
def test_the_choice_does_not_depend_on_the_order_of_entries(table: BucketTable) -> None:
    turned = BucketTable(table.prompt[::-1], table.decode[::-1])

    assert turned.find_prompt(1, 2, 3) == table.find_prompt(1, 2, 3)
    assert turned.find_decode(2, 3) == table.find_decode(2, 3)
