from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.bucket_file import EVALUATED, LITERAL, Dialect, bucket_lines, read_bucket_file
from aotgaudi.bucketing.strategy import Bucket

buckets = st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(0, 40))


def read(lines: list[str], dialect: Dialect) -> list[Bucket]:
    found = read_bucket_file("\n".join(lines), dialect)
    assert not found.skipped
    return [*found.prompt, *found.decode]


@pytest.mark.parametrize("dialect", [LITERAL, EVALUATED])
@given(table=st.sets(buckets))
def test_what_is_written_is_read_back_once_each(table: set[Bucket], dialect: Dialect) -> None:
    found = read(list(bucket_lines(table)), dialect)

    assert len(found) == len(table)
    assert set(found) == table


@given(st.lists(buckets, max_size=12))
def test_order_and_repetition_change_nothing(table: list[Bucket]) -> None:
    assert list(bucket_lines(table)) == list(bucket_lines([*reversed(table), *table]))


@pytest.mark.parametrize(
    ("table", "lines"),
    [
        ([], []),
        ([(1, 128, 0)], ["(1, 128, 0)"]),
        ([(1, 128, 0), (1, 128, 1), (1, 128, 2)], ["(1, 128, [0, 1, 2])"]),
        ([(1, 128, context) for context in range(4)], ["(1, 128, range(0, 4))"]),
        ([(1, 128, context) for context in (2, 5, 8, 11)], ["(1, 128, range(2, 12, 3))"]),
        ([(1, query, 0) for query in (128, 256)], ["(1, [128, 256], 0)"]),
        ([(1, 128, 0), (1, 256, 1), (2, 256, 1)], ["(1, 128, 0)", "(1, 256, 1)", "(2, 256, 1)"]),
    ],
)
def test_equal_pieces_share_a_line(table: list[Bucket], lines: list[str]) -> None:
    assert list(bucket_lines(table)) == lines


@pytest.mark.parametrize("dialect", [LITERAL, EVALUATED])
def test_lists_and_ranges_stay_as_short_as_readers_take_them(dialect: Dialect) -> None:
    progression = [(1, 128, context) for context in range(10_001)]
    irregular = [(2, 128, context * context) for context in range(2_500)]

    found = read(list(bucket_lines([*progression, *irregular])), dialect)

    assert sorted(found) == [*progression, *irregular]
