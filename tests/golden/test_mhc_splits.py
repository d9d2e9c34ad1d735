"""Hyper-connection buckets, number for number, against rows that the formula gave by brute force.

The rows agree with SGLang PR #25810's own function (tests/golden/data/mhc/README.md).
"""

from __future__ import annotations

from aotgaudi.bucketing.mhc_splits import (
    MhcInputs,
    split_buckets,
    warm_up_buckets,
)
from tests.golden.rows import Row, read_rows


def count_splits(num_tokens: int, width: int, num_sms: int) -> int:
    """The splits of a token count: those of the last bucket up to it. No tokens count as one."""
    return split_buckets(max(1, num_tokens), width, num_sms)[-1].n_splits


def representatives(most: int, width: int, num_sms: int) -> tuple[int, ...]:
    """The largest token count of each bucket, descending, as PR #25810 lists them."""
    return tuple(bucket.last_token for bucket in reversed(split_buckets(most, width, num_sms)))


def of_row(row: Row) -> dict[str, object]:
    """What we make of the inputs of a row, under its names."""
    most, width, num_sms = row["max_num_tokens"], row["hc_hidden_size"], row["num_sms"]
    inputs = MhcInputs(most, row["hc_mult"], row["hidden_size"], num_sms)
    tokens = representatives(most, width, num_sms)
    warm = warm_up_buckets("sglang-pr25810", inputs)
    assert [(bucket.n_splits, bucket.last_token) for bucket in warm] == [
        (count_splits(token, width, num_sms), token) for token in tokens
    ]
    return {
        "hc_hidden_size": inputs.hc_hidden_size,
        "representatives": list(tokens),
        "representatives_ascending": sorted(tokens),
        "num_buckets": len(tokens),
        "n_splits": [count_splits(token, width, num_sms) for token in tokens],
        "buckets": [
            {"n_splits": one.n_splits, "first_token": one.first_token, "last_token": one.last_token}
            for one in split_buckets(most, width, num_sms)
        ],
        "probes": [
            {**probe, "n_splits": count_splits(probe["num_tokens"], width, num_sms)}
            for probe in row["probes"]
        ],
    }


def test_every_field_and_every_probe_of_every_row_is_reproduced() -> None:
    rows = read_rows("mhc/token_count_representatives.jsonl")

    assert [row["id"] for row in rows if row != {**row, **of_row(row)}] == []
    assert len(rows) > 100
