"""Upstream's look-ups and fallbacks, in their order, against series that the public code produced."""

from __future__ import annotations

from aotgaudi.bucketing.upstream import calc_fallback_value
from aotgaudi.bucketing.versions import find_strategy, open_upstream_lookup
from tests.golden.rows import Row, check_table, each_of, inputs_of, read_rows

ROWS = read_rows("bucketing/lookup.jsonl.gz")
FALLBACKS = [
    row for row in read_rows("bucketing/ranges1d.jsonl.gz") if row["fn"] == "common.calc_fallback_value"
]


@each_of(ROWS)
def test_series_of_look_ups_equals_the_public_code(row: Row) -> None:
    lookup = open_upstream_lookup(row["version"], row["strategy"], inputs_of(row))

    for phase, batch_size, query_len, context, bucket, added in row["lookups"]:
        if phase == "prompt":
            answer = lookup.find_prompt(batch_size, query_len, context)
        else:
            answer = lookup.find_decode(batch_size, context)
        assert (list(answer.bucket), int(answer.is_added)) == (bucket, added)


@each_of(ROWS)
def test_tables_before_the_look_ups_equal_the_public_code(row: Row) -> None:
    inputs, strategy = inputs_of(row), find_strategy(row["version"], row["strategy"])

    check_table(lambda: strategy.prompt_table(inputs), row["prompt_buckets"])
    check_table(lambda: strategy.decode_table(inputs), row["decode_buckets"])


@each_of(FALLBACKS)
def test_fallback_values_equal_the_public_code(row: Row) -> None:
    (base_step,) = row["args"]

    assert [[value, calc_fallback_value(value, base_step)] for value, _ in row["result"]] == row["result"]


def test_every_row_of_look_ups_is_walked() -> None:
    """Guards against a filter that silently leaves rows out."""
    assert {row["id"] for row in ROWS} == {row["id"] for row in read_rows("bucketing/lookup.jsonl.gz")}
    assert {phase for row in ROWS for phase, *_ in row["lookups"]} <= {"prompt", "decode"}
    common = {
        row["fn"] for row in read_rows("bucketing/ranges1d.jsonl.gz") if row["fn"].startswith("common.")
    }
    assert common == {row["fn"] for row in FALLBACKS}
