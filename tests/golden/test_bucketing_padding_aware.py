"""The padding-aware tables: every row of ``padding_aware.jsonl.gz``, and the large and the single ones."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from aotgaudi.bucketing.linear import (
    PaddedAxes,
    PaddedAxis,
    padded_decode_axes,
    padded_prompt_axes,
    padded_range,
)
from aotgaudi.bucketing.versions import find_strategy
from aotgaudi.errors import SpecError
from tests.golden.phases import check_phase, inputs_of_phase, phases_with, with_phases
from tests.golden.rows import Row, each_of, read_rows

ROWS = read_rows("bucketing/padding_aware.jsonl.gz")
LARGE_ROWS = [row for row in read_rows("bucketing/large.jsonl.gz") if row["strategy"] == "padding_aware"]
RANGE_ROWS = [
    row for row in read_rows("bucketing/ranges1d.jsonl.gz") if row["fn"].startswith("padding_aware.")
]


def axes_of(row: Row, phase: str) -> PaddedAxes:
    inputs = inputs_of_phase(row, phase)
    return padded_prompt_axes(inputs) if phase == "prompt" else padded_decode_axes(inputs)


@each_of(with_phases(ROWS + LARGE_ROWS))
def test_tables_equal_the_public_code(row: Row, phase: str) -> None:
    assert row["strategy"] == "padding_aware"

    check_phase(row, phase, find_strategy(row["version"], "padding_aware"))


@each_of(phases_with(ROWS + LARGE_ROWS, "cfg"))
def test_dimensions_equal_the_public_code(row: Row, phase: str) -> None:
    if any(pad_percent > 50 for *_, pad_percent in row[f"{phase}_cfg"]):
        with pytest.raises(SpecError, match="BUCKET_PAD_PERCENT"):
            axes_of(row, phase)
        return

    assert [list(axis) for axis in astuple(axes_of(row, phase))] == row[f"{phase}_cfg"]


@each_of(phases_with(ROWS + LARGE_ROWS, "ranges"))
def test_ranges_equal_the_public_code(row: Row, phase: str) -> None:
    assert [list(values) for values in astuple(axes_of(row, phase).ranges(phase))] == row[f"{phase}_ranges"]


@each_of(RANGE_ROWS)
def test_one_range_equals_the_public_code(row: Row) -> None:
    assert row["fn"] == "padding_aware.warmup_range_with_limits"
    axis = PaddedAxis(*row["args"])
    if not isinstance(row["result"], list):
        with pytest.raises(SpecError):
            padded_range(axis)
        return

    assert list(padded_range(axis)) == row["result"]
