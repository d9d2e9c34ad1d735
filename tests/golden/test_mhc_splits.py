"""Hyper-connection buckets, number for number, against rows that the formula gave by brute force.

The rows agree with SGLang PR #25810's own function (tests/golden/data/mhc/README.md).
"""

from __future__ import annotations

import pytest

from aotgaudi.bucketing.mhc_splits import (
    MhcInputs,
    split_buckets,
    warm_up_buckets,
)
from tests.golden.rows import Row, read_rows

ROWS = [pytest.param(row, id=row["id"]) for row in read_rows("mhc/token_count_representatives.jsonl")]


def count_splits(num_tokens: int, width: int, num_sms: int) -> int:
    """The splits of a token count: those of the last bucket up to it. No tokens count as one."""
    return split_buckets(max(1, num_tokens), width, num_sms)[-1].n_splits


def representatives(most: int, width: int, num_sms: int) -> tuple[int, ...]:
    """The largest token count of each bucket, descending, as PR #25810 lists them."""
    return tuple(bucket.last_token for bucket in reversed(split_buckets(most, width, num_sms)))


@pytest.mark.parametrize("row", ROWS)
def test_every_field_of_a_row_is_reproduced(row: Row) -> None:
    most, width, num_sms = row["max_num_tokens"], row["hc_hidden_size"], row["num_sms"]
    inputs = MhcInputs(most, row["hc_mult"], row["hidden_size"], num_sms)

    tokens = representatives(most, width, num_sms)
    buckets = split_buckets(most, width, num_sms)
    warm = warm_up_buckets("sglang-pr25810", inputs)

    assert inputs.hc_hidden_size == width
    assert list(tokens) == row["representatives"]
    assert sorted(tokens) == row["representatives_ascending"]
    assert len(tokens) == row["num_buckets"]
    assert [count_splits(token, width, num_sms) for token in tokens] == row["n_splits"]
    assert [
        {"n_splits": b.n_splits, "first_token": b.first_token, "last_token": b.last_token} for b in buckets
    ] == row["buckets"]
    assert [(b.n_splits, b.last_token) for b in warm] == list(
        zip(row["n_splits"], row["representatives"], strict=True)
    )


@pytest.mark.parametrize("row", ROWS)
def test_every_probe_is_reproduced(row: Row) -> None:
    for probe in row["probes"]:
        assert count_splits(probe["num_tokens"], row["hc_hidden_size"], row["num_sms"]) == probe["n_splits"]
