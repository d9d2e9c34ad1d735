"""The two-dimensional tables of Gaudi 1.21: every row of ``legacy2d.jsonl.gz``, in upstream's order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

from aotgaudi.bucketing.exponential import ExponentialAxis
from aotgaudi.bucketing.extension import (
    exponential_decode_axes,
    exponential_prompt_axes,
    linear_decode_axes,
    prompt_axes,
)
from aotgaudi.bucketing.linear import LinearAxis
from aotgaudi.bucketing.versions import find_strategy
from tests.golden.rows import PHASES, Row, check_table, each_of, inputs_of_phase, phases_with, read_rows

ROWS = read_rows("bucketing/legacy2d.jsonl.gz")
STRATEGIES = {"linear_2d": "linear", "exponential_2d": "exponential"}
AXES = {
    ("linear_2d", "prompt"): prompt_axes,
    ("linear_2d", "decode"): linear_decode_axes,
    ("exponential_2d", "prompt"): exponential_prompt_axes,
    ("exponential_2d", "decode"): exponential_decode_axes,
}


def phases_made() -> list[tuple[Row, str]]:
    """A row that failed has the error of the whole, and the tables that were made before it."""
    return [(row, phase) for row in ROWS for phase in PHASES if phase == "prompt" or "prompt_buckets" in row]


@each_of(phases_made())
def test_tables_equal_the_public_code(row: Row, phase: str) -> None:
    strategy = find_strategy(row["version"], STRATEGIES[row["strategy"]])

    def make() -> list[Sequence[int]]:
        inputs = inputs_of_phase(row, phase)
        if phase == "prompt":
            assert all(context == 0 for _, _, context in strategy.prompt_table(inputs))
            return [bucket[:2] for bucket in strategy.prompt_table(inputs)]
        assert all(query_len == 1 for _, query_len, _ in strategy.decode_table(inputs))
        return [(batch_size, num_blocks) for batch_size, _, num_blocks in strategy.decode_table(inputs)]

    golden = row.get(f"{phase}_buckets")
    check_table(make, golden, None if golden else row.get("error"))


@each_of(phases_with(ROWS, "cfg"))
def test_dimensions_equal_the_public_code(row: Row, phase: str) -> None:
    axes: tuple[LinearAxis | ExponentialAxis, ...] = AXES[row["strategy"], phase](inputs_of_phase(row, phase))

    assert [list(astuple(axis)) for axis in axes] == row[f"{phase}_cfg"]
