"""The unified-attention tables, number for number: every row of ``unified.jsonl.gz``, and its single ranges."""

from __future__ import annotations

from dataclasses import astuple

from aotgaudi.bucketing.unified import UnifiedAxis, unified_axes, unified_range
from aotgaudi.bucketing.versions import find_unified
from tests.golden.rows import Row, check_table, each_of, inputs_of, read_rows

ROWS = read_rows("bucketing/unified.jsonl.gz")
RANGE_ROWS = [row for row in read_rows("bucketing/ranges1d.jsonl.gz") if row["fn"].startswith("unified.")]


@each_of(ROWS)
def test_tables_equal_the_public_code(row: Row) -> None:
    assert row["strategy"] == "unified"
    inputs, strategy = inputs_of(row), find_unified(row["version"])

    check_table(lambda: strategy.unified_table(inputs), row.get("unified_buckets"), row.get("error"))


@each_of(row for row in ROWS if row["unified_cfg"] is not None)
def test_ranges_equal_the_public_code(row: Row) -> None:
    axes = unified_axes(inputs_of(row))

    found = (axes.query_len, axes.shared_context, axes.unique_context)
    assert [list(astuple(axis)) for axis in found] == row["unified_cfg"]
    assert [list(unified_range(axis)) for axis in found] == row["unified_ranges"]


@each_of(RANGE_ROWS)
def test_one_range_equals_the_public_code(row: Row) -> None:
    assert row["fn"] == "unified.warmup_unified_range"

    assert list(unified_range(UnifiedAxis(*row["args"]))) == row["result"]
