from __future__ import annotations

from itertools import combinations_with_replacement

from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.replicas import padded_decodes, padded_prompts, padded_shapes
from aotgaudi.entries import DecodeEntry, PromptEntry

SIZE = st.integers(1, 6)
PROMPTS = st.frozensets(st.tuples(st.integers(1, 3), SIZE, st.integers(0, 5)), min_size=1, max_size=12)
DECODES = st.frozensets(st.tuples(st.integers(1, 4), SIZE), min_size=1, max_size=10)


@given(PROMPTS)
def test_prompts_are_padded_to_every_maximum_of_up_to_three_buckets(
    table: frozenset[tuple[int, int, int]],
) -> None:
    maxima = {
        tuple(map(max, zip(*some, strict=True))) for some in combinations_with_replacement(sorted(table), 3)
    }

    assert list(padded_prompts(table)) == sorted(maxima - table)


def _blocks(table: frozenset[tuple[int, int]], size: int, blocks: int) -> int | None:
    return next((b for s, b in sorted(table) if s >= size and b >= blocks), None)


@given(DECODES)
def test_decodes_are_looked_up_for_the_largest_batch_of_all(table: frozenset[tuple[int, int]]) -> None:
    closed = table | set(padded_decodes(table))

    for used in (table, closed):
        for one, other in combinations_with_replacement(sorted(table), 2):
            for blocks in range(1, one[1] + 1):
                size = max(one[0], other[0])
                found = [_blocks(used, size, blocks), _blocks(used, size, other[1])]
                if used == closed or None not in found:
                    assert (size, max(filter(None, found))) in closed, (size, found)
    assert not set(padded_decodes(closed))


def test_a_closed_table_gets_nothing_added() -> None:
    table = BucketTable(
        (PromptEntry(1, 128, 0), PromptEntry(1, 256, 0), PromptEntry(1, 128, 4), PromptEntry(1, 256, 2)),
        (DecodeEntry(1, 1, 8), DecodeEntry(2, 1, 4), DecodeEntry(4, 1, 6)),
    )

    added = padded_shapes(table)

    assert added == (PromptEntry(1, 256, 4), DecodeEntry(2, 1, 6), DecodeEntry(2, 1, 8), DecodeEntry(4, 1, 8))
    closed = (*table.prompt, *table.decode, *added)
    assert padded_shapes(BucketTable.from_entries(closed)) == ()
