"""The tables that the vLLM-Gaudi README shows, exactly, from the version that logged them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from aotgaudi.bucketing.extension import extension_range
from aotgaudi.bucketing.linear import LinearAxis, linear_range
from aotgaudi.bucketing.versions import VERSIONS, find_strategy
from tests.golden.rows import GOLDENS, Row, check_table, each_of, inputs_of, read_rows

ROWS = read_rows("bucketing/readme_tables.jsonl")
TABLES = [row for row in ROWS if "strategy" in row]
LINEAR = [row for row in ROWS if row.get("fn") == "linear.warmup_range"]
NOT_TABLES_EXCLUDED = {"enumeration_timing.jsonl": "wall times of the public code, for the benchmark"}


def with_other_ends(row: Row) -> Iterator[Row]:
    """Yields the row itself, and the row at both ends of every input for which its table is said to hold."""
    yield row
    for name, ends in row["valid_for"].items():
        for value in ends if isinstance(ends, list) else ():
            yield {**row, "inputs": {**row["inputs"], name: value}}


@each_of(TABLES)
def test_logged_tables_are_reproduced(row: Row) -> None:
    strategy = find_strategy(row["version"], row["strategy"])

    for case in with_other_ends(row):
        inputs = inputs_of(case)
        check_table(lambda: strategy.prompt_table(inputs), row["prompt_buckets"])  # noqa: B023
        check_table(lambda: strategy.decode_table(inputs), row["decode_buckets"])  # noqa: B023


@each_of(TABLES)
def test_other_versions_that_are_said_to_reproduce_a_table_do(row: Row) -> None:
    inputs = inputs_of(row)

    for version in VERSIONS.keys() & row["also_reproduced_by"]:
        check_table(lambda: find_strategy(version, "exponential").prompt_table(inputs), row["prompt_buckets"])  # noqa: B023
    for version in VERSIONS.keys() & {*row["also_reproduced_by"], *row.get("decode_only_also_by", ())}:
        check_table(lambda: find_strategy(version, "exponential").decode_table(inputs), row["decode_buckets"])  # noqa: B023


@each_of(LINEAR)
def test_linear_examples_are_reproduced_by_every_version(row: Row) -> None:
    axis = LinearAxis(*row["args"])

    assert list(linear_range(axis)) == row["result"]
    assert list(extension_range(axis, "bucketing")) == row["result"]


def test_every_table_of_the_readme_is_walked() -> None:
    """Guards against a filter that silently leaves rows out."""
    assert [row["id"] for row in TABLES + LINEAR] == [row["id"] for row in ROWS]


def test_every_file_of_the_goldens_is_walked_by_a_test() -> None:
    """Guards against a file of rows that no test names."""
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    names = {path.name for path in (GOLDENS / "bucketing").glob("*.jsonl*")} - NOT_TABLES_EXCLUDED.keys()

    assert [name for name in sorted(names) if f"bucketing/{name}" not in tests] == []
