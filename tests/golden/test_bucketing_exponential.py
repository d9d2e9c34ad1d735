"""The exponential tables of vllm-gaudi main, number for number, against tables that the public code produced.

The tables lie in ``tests/golden/data/bucketing`` (its README says how they were made). Set
``AOTGAUDI_GOLDENS`` to a folder that holds ``bucketing/`` to check other rows.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.bucketing.exponential import (
    ExponentialAxes,
    ExponentialAxis,
    ExponentialStrategy,
    decode_axes,
    exponential_range,
    prompt_axes,
)
from aotgaudi.bucketing.inputs import Bucket, BucketingInputs, Ranges, SlidingSlices
from aotgaudi.bucketing.versions import decode_buckets, decode_seed_buckets, find_strategy, prompt_buckets
from aotgaudi.errors import SpecError

VERSION = "vllm-gaudi@091bbad"
GOLDENS = Path(os.environ.get("AOTGAUDI_GOLDENS", Path(__file__).parent / "data")) / "bucketing"
UPSTREAM_TRUE = ("true", "t", "1", "yes", "y", "on")
ENVIRONMENT_KNOWN = {
    "VLLM_CONTIGUOUS_PA",
    "VLLM_MERGED_PREFILL",
    "VLLM_PROMPT_QUERY_BUCKET_MIN",
    "VLLM_PROMPT_CTX_BUCKET_MAX",
    "PT_HPU_SDPA_QKV_SLICE_MODE_FWD",
    "PT_HPU_SDPA_BC_FACTOR",
    "VLLM_FUSEDSDPA_SLIDE_THLD",
}

Row = dict[str, Any]


def read_rows(name: str, keep: Callable[[Row], bool]) -> list[Any]:
    with gzip.open(GOLDENS / name, "rt", encoding="utf-8") as file:
        rows = [row for row in map(json.loads, file) if row["version"] == VERSION and keep(row)]
    return [pytest.param(row, id=row["id"]) for row in rows]


def is_exponential(row: Row) -> bool:
    return bool(row["strategy"] == "exponential")


def is_exponential_range(row: Row) -> bool:
    return "exponential" in row["fn"] and "range" in row["fn"]


def inputs_of(row: Row) -> BucketingInputs:
    environment, numbers = row["env"], dict(row["inputs"])
    assert environment.keys() <= ENVIRONMENT_KNOWN
    ctx_max = environment.get("VLLM_PROMPT_CTX_BUCKET_MAX")
    return BucketingInputs(
        num_blocks=numbers.pop("num_hpu_blocks"),
        **numbers,
        contiguous_pa=is_true(environment.get("VLLM_CONTIGUOUS_PA", str(not row["prefix_caching"]))),
        merged_prefill=is_true(environment.get("VLLM_MERGED_PREFILL", "false")),
        prompt_query_min_one=environment.get("VLLM_PROMPT_QUERY_BUCKET_MIN") == "1",
        prompt_ctx_max=None if ctx_max is None else int(ctx_max),
        sliding=sliding_of(environment),
    )


def is_true(text: str) -> bool:
    return text.lower() in UPSTREAM_TRUE


def sliding_of(environment: dict[str, str]) -> SlidingSlices | None:
    if not is_true(environment.get("PT_HPU_SDPA_QKV_SLICE_MODE_FWD", "false")):
        return None
    return SlidingSlices(
        threshold=int(environment.get("VLLM_FUSEDSDPA_SLIDE_THLD", "8192")),
        slice_len=int(environment.get("PT_HPU_SDPA_BC_FACTOR", "1024")),
    )


def check_table(make: Callable[[], tuple[Bucket, ...]], golden: Row | None, error: str | None) -> None:
    if error is not None:
        with pytest.raises(SpecError):
            make()
        return
    assert golden is not None
    table = [list(bucket) for bucket in make()]
    text = json.dumps(table, separators=(",", ":"))
    if "list" in golden:
        assert table == golden["list"]
    else:
        assert (table[:5], table[-5:]) == (golden["head"], golden["tail"])
    assert (len(table), hashlib.sha256(text.encode()).hexdigest()) == (golden["n"], golden["sha256"])


def check_ranges(axes: ExponentialAxes, ranges: Ranges, row: Row, phase: str) -> None:
    assert [list(astuple(a)) for a in (axes.batch_size, axes.query_len, axes.context)] == row[f"{phase}_cfg"]
    assert [list(values) for values in astuple(ranges)] == row[f"{phase}_ranges"]


@pytest.mark.parametrize(
    "row", read_rows("exponential.jsonl.gz", is_exponential) + read_rows("large.jsonl.gz", is_exponential)
)
def test_tables_equal_the_public_code(row: Row) -> None:
    inputs, strategy = inputs_of(row), find_strategy(VERSION, "exponential")
    whole = row.get("error")

    check_table(
        lambda: prompt_buckets(inputs, strategy), row.get("prompt_buckets"), row.get("prompt_error", whole)
    )
    check_table(
        lambda: decode_buckets(inputs, strategy), row.get("decode_buckets"), row.get("decode_error", whole)
    )
    if "decode_seed_buckets" in row:
        check_table(lambda: decode_seed_buckets(inputs, strategy), row["decode_seed_buckets"], None)


@pytest.mark.parametrize("row", read_rows("exponential.jsonl.gz", lambda row: "prompt_cfg" in row))
def test_ranges_equal_the_public_code(row: Row) -> None:
    inputs = inputs_of(row)
    assert inputs.contiguous_pa == row["use_contiguous_pa"]

    check_ranges(prompt_axes(inputs), ExponentialStrategy().prompt_ranges(inputs), row, "prompt")
    check_ranges(decode_axes(inputs), ExponentialStrategy().decode_ranges(inputs), row, "decode")


@pytest.mark.parametrize("row", read_rows("ranges1d.jsonl.gz", is_exponential_range))
def test_one_range_equals_the_public_code(row: Row) -> None:
    axis = ExponentialAxis(*row["args"])
    if "range_error" in row or "error" in row:
        with pytest.raises(SpecError):
            exponential_range(axis, contiguous_pa=row["use_contiguous_pa"])
        return

    assert list(exponential_range(axis, contiguous_pa=row["use_contiguous_pa"])) == row["result"]


def test_every_row_of_this_version_is_walked() -> None:
    """Guards against a filter that silently leaves rows out."""
    with gzip.open(GOLDENS / "exponential.jsonl.gz", "rt", encoding="utf-8") as file:
        expected = sum(json.loads(line)["version"] == VERSION for line in file)

    assert len(read_rows("exponential.jsonl.gz", is_exponential)) == expected > 0
