"""The linear, the padding-aware and the files' tables, number for number: every row, the large and the single ones, too."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from aotgaudi.bucketing.combine import ProductStrategy
from aotgaudi.bucketing.linear import (
    LinearAxes,
    LinearAxis,
    LinearRanges,
    PaddedAxis,
    linear_range,
    padded_decode_axes,
    padded_prompt_axes,
    padded_range,
)
from aotgaudi.bucketing.versions import find_strategy
from aotgaudi.errors import SpecError
from tests.golden.rows import (
    PHASES,
    Row,
    check_phase,
    each_of,
    inputs_of_phase,
    phases_with,
    read_rows,
    with_phases,
)

STRATEGIES = ("linear", "padding_aware")
OWN_ROWS = {
    "linear": read_rows("bucketing/linear.jsonl.gz"),
    "padding_aware": read_rows("bucketing/padding_aware.jsonl.gz"),
}
LARGE_ROWS = [row for row in read_rows("bucketing/large.jsonl.gz") if row["strategy"] in STRATEGIES]
ROWS = [*(row for rows in OWN_ROWS.values() for row in rows), *LARGE_ROWS]
RANGE_ROWS = [
    row for row in read_rows("bucketing/ranges1d.jsonl.gz") if row["fn"].split(".")[0] in STRATEGIES
]


def axes_of(row: Row, phase: str) -> LinearAxes:
    inputs = inputs_of_phase(row, phase)
    if row["strategy"] == "padding_aware":
        return padded_prompt_axes(inputs) if phase == "prompt" else padded_decode_axes(inputs)
    strategy = find_strategy(row["version"], "linear")
    assert isinstance(strategy, ProductStrategy)
    assert isinstance(strategy.ranges, LinearRanges)
    return strategy.ranges.prompt_axes(inputs) if phase == "prompt" else strategy.ranges.decode_axes(inputs)


@each_of(with_phases(ROWS))
def test_tables_equal_the_public_code(row: Row, phase: str) -> None:
    check_phase(row, phase, find_strategy(row["version"], row["strategy"]))


@each_of(with_phases(read_rows("bucketing/file.jsonl.gz")))
def test_tables_of_files_malformed_ones_included_equal_the_public_code(row: Row, phase: str) -> None:
    assert row["strategy"] == "file"

    check_phase(row, phase, find_strategy(row["version"], "file"))


@each_of(phases_with(ROWS, "cfg"))
def test_dimensions_equal_the_public_code(row: Row, phase: str) -> None:
    dimensions = row[f"{phase}_cfg"]
    if row["strategy"] == "padding_aware" and any(pad_percent > 50 for *_, pad_percent in dimensions):
        with pytest.raises(SpecError, match="BUCKET_PAD_PERCENT"):
            axes_of(row, phase)
        return

    assert [list(axis) for axis in astuple(axes_of(row, phase))] == dimensions


@each_of(phases_with(ROWS, "ranges"))
def test_ranges_equal_the_public_code(row: Row, phase: str) -> None:
    assert [list(values) for values in astuple(axes_of(row, phase).ranges(phase))] == row[f"{phase}_ranges"]


def range_of(row: Row) -> tuple[int, ...]:
    if row["fn"] == "padding_aware.warmup_range_with_limits":
        return padded_range(PaddedAxis(*row["args"]))
    assert row["fn"] == "linear.warmup_range"
    return linear_range(LinearAxis(*row["args"]))


@each_of(RANGE_ROWS)
def test_one_range_equals_the_public_code(row: Row) -> None:
    if not isinstance(row["result"], list):
        with pytest.raises(SpecError):
            range_of(row)
        return

    # The public linear function gives 0 last, and its caller sorts.
    is_linear = row["fn"] == "linear.warmup_range"
    assert list(range_of(row)) == (sorted(row["result"]) if is_linear else row["result"])


def test_every_row_of_the_shared_files_has_a_test() -> None:
    """Guards against rows that no test's filter takes: each strategy has a golden test."""
    large = {row["strategy"] for row in read_rows("bucketing/large.jsonl.gz")}
    functions = {row["fn"].split(".")[0] for row in read_rows("bucketing/ranges1d.jsonl.gz")}

    assert large <= {"exponential", *STRATEGIES}
    assert functions <= {"exponential", *STRATEGIES, "unified", "common"}
    for name, rows in OWN_ROWS.items():
        assert {row["strategy"] for row in rows} <= {name}


def test_every_field_of_a_linear_row_is_compared() -> None:
    tables = {f"{phase}_{part}" for phase in PHASES for part in ("buckets", "cfg", "ranges", "error")}
    request = {"id", "version", "strategy", "inputs", "env", "prefix_caching", "use_contiguous_pa", "large"}

    for row in ROWS:
        if row["strategy"] == "linear":
            assert row.keys() <= tables | request | {"range_error"}
            assert "range_error" not in row or row.keys() & {"prompt_error", "decode_error"}
