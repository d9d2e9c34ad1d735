"""The linear tables, number for number: every row of ``linear.jsonl.gz``, and the large and the single ones."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from aotgaudi.bucketing.combine import ProductStrategy
from aotgaudi.bucketing.linear import LinearAxes, LinearAxis, LinearRanges, linear_range
from aotgaudi.bucketing.versions import find_strategy
from aotgaudi.errors import SpecError
from tests.golden.phases import PHASES, check_phase, inputs_of_phase, phases_with, with_phases
from tests.golden.rows import Row, each_of, read_rows

ROWS = read_rows("bucketing/linear.jsonl.gz")
LARGE_ROWS = [row for row in read_rows("bucketing/large.jsonl.gz") if row["strategy"] == "linear"]
RANGE_ROWS = [row for row in read_rows("bucketing/ranges1d.jsonl.gz") if row["fn"].startswith("linear.")]


def axes_of(row: Row, phase: str) -> LinearAxes:
    strategy, inputs = find_strategy(row["version"], "linear"), inputs_of_phase(row, phase)
    assert isinstance(strategy, ProductStrategy)
    assert isinstance(strategy.ranges, LinearRanges)
    return strategy.ranges.prompt_axes(inputs) if phase == "prompt" else strategy.ranges.decode_axes(inputs)


@each_of(with_phases(ROWS + LARGE_ROWS))
def test_tables_equal_the_public_code(row: Row, phase: str) -> None:
    assert row["strategy"] == "linear"

    check_phase(row, phase, find_strategy(row["version"], "linear"))


@each_of(phases_with(ROWS + LARGE_ROWS, "cfg"))
def test_dimensions_equal_the_public_code(row: Row, phase: str) -> None:
    assert [list(axis) for axis in astuple(axes_of(row, phase))] == row[f"{phase}_cfg"]


@each_of(phases_with(ROWS + LARGE_ROWS, "ranges"))
def test_ranges_equal_the_public_code(row: Row, phase: str) -> None:
    assert [list(values) for values in astuple(axes_of(row, phase).ranges(phase))] == row[f"{phase}_ranges"]


@each_of(RANGE_ROWS)
def test_one_range_equals_the_public_code(row: Row) -> None:
    assert row["fn"] == "linear.warmup_range"
    axis = LinearAxis(*row["args"])
    if not isinstance(row["result"], list):
        with pytest.raises(SpecError):
            linear_range(axis)
        return

    # The public function gives 0 last, and its caller sorts.
    assert list(linear_range(axis)) == sorted(row["result"])


def test_every_row_of_the_shared_files_has_a_test() -> None:
    """Guards against rows that no test's filter takes: each strategy here has a golden test of its name."""
    large = {row["strategy"] for row in read_rows("bucketing/large.jsonl.gz")}
    functions = {row["fn"].split(".")[0] for row in read_rows("bucketing/ranges1d.jsonl.gz")}

    assert large <= {"exponential", "linear", "padding_aware"}
    assert functions <= {"exponential", "linear", "padding_aware", "unified", "common"}


def test_every_field_of_a_row_is_compared() -> None:
    tables = {f"{phase}_{part}" for phase in PHASES for part in ("buckets", "cfg", "ranges", "error")}
    request = {"id", "version", "strategy", "inputs", "env", "prefix_caching", "use_contiguous_pa", "large"}

    for row in ROWS + LARGE_ROWS:
        assert row.keys() <= tables | request | {"range_error"}
        assert "range_error" not in row or row.keys() & {"prompt_error", "decode_error"}
