"""The exponential tables of every version, number for number, against tables that the public code produced."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from aotgaudi.bucketing.combine import ProductStrategy
from aotgaudi.bucketing.exponential import (
    ExponentialAxes,
    ExponentialAxis,
    ExponentialRanges,
    RangeRule,
    exponential_range,
)
from aotgaudi.bucketing.extension import EXTENSION_POINTS
from aotgaudi.bucketing.strategy import Ranges
from aotgaudi.bucketing.versions import find_strategy
from aotgaudi.errors import SpecError
from tests.golden.rows import Row, check_table, each_of, inputs_of, read_rows

ROWS = read_rows("bucketing/exponential.jsonl.gz")
LARGE = [row for row in read_rows("bucketing/large.jsonl.gz") if row["strategy"] == "exponential"]
POINTS = [
    row
    for row in read_rows("bucketing/ranges1d.jsonl.gz")
    if row["fn"] == "exponential.warmup_range_with_limit"
]


def ranges_of(version: str) -> ExponentialRanges:
    """Returns the ranges of a version of vllm-gaudi from v0.11.2 on."""
    strategy = find_strategy(version, "exponential")
    assert isinstance(strategy, ProductStrategy)
    assert isinstance(strategy.ranges, ExponentialRanges)
    return strategy.ranges


def point_rule(version: str) -> RangeRule:
    """Returns how a version chooses points; those of the extension are all alike."""
    strategy = find_strategy(version, "exponential")
    return ranges_of(version).rules.points if isinstance(strategy, ProductStrategy) else EXTENSION_POINTS


def check_ranges(axes: ExponentialAxes, ranges: Ranges, row: Row, phase: str) -> None:
    assert [list(axis) for axis in astuple(axes)] == row[f"{phase}_cfg"]
    assert [list(values) for values in astuple(ranges)] == row[f"{phase}_ranges"]


@each_of(ROWS + LARGE)
def test_tables_equal_the_public_code(row: Row) -> None:
    inputs, strategy, whole = inputs_of(row), find_strategy(row["version"], "exponential"), row.get("error")

    check_table(
        lambda: strategy.prompt_table(inputs), row.get("prompt_buckets"), row.get("prompt_error", whole)
    )
    check_table(
        lambda: strategy.decode_table(inputs), row.get("decode_buckets"), row.get("decode_error", whole)
    )
    if "decode_seed_buckets" in row:
        check_table(lambda: strategy.decode_seed_table(inputs), row["decode_seed_buckets"])


@each_of(row for row in ROWS + LARGE if "prompt_cfg" in row)
def test_ranges_equal_the_public_code(row: Row) -> None:
    inputs, ranges = inputs_of(row), ranges_of(row["version"])

    check_ranges(ranges.prompt_axes(inputs), ranges.prompt_ranges(inputs), row, "prompt")
    check_ranges(ranges.decode_axes(inputs), ranges.decode_ranges(inputs), row, "decode")


@each_of(POINTS)
def test_the_points_of_one_dimension_equal_the_public_code(row: Row) -> None:
    axis, rule = ExponentialAxis(*row["args"]), point_rule(row["version"])
    modes = {"contiguous_pa": row["use_contiguous_pa"], "long_context": row["long_context"]}

    if isinstance(row.get("result"), list):
        assert list(exponential_range(axis, rule, **modes)) == row["result"]
    else:  # the name of upstream's exception
        with pytest.raises(SpecError):
            exponential_range(axis, rule, **modes)


def test_every_row_of_this_strategy_is_walked() -> None:
    """Guards against a filter that silently leaves rows out."""
    walked = {(row["version"], row["id"]) for row in ROWS + LARGE + POINTS}

    for row in read_rows("bucketing/exponential.jsonl.gz"):
        assert row["strategy"] == "exponential"
        assert (row["version"], row["id"]) in walked
    for row in read_rows("bucketing/large.jsonl.gz"):
        assert ((row["version"], row["id"]) in walked) == (row["strategy"] == "exponential")
    for row in read_rows("bucketing/ranges1d.jsonl.gz"):
        assert ((row["version"], row["id"]) in walked) == row["fn"].startswith("exponential.")
