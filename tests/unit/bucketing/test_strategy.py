"""Invariants of the tables of all versions; the numbers themselves are held by tests/golden."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.strategy import MAX_BUCKETS, BucketingInputs, Strategy
from aotgaudi.bucketing.versions import VERSIONS, find_strategy
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.errors import SpecError
from aotgaudi.manifest.bucket_file import bucket_file_of
from aotgaudi.manifest.coverage import coverage_of
from aotgaudi.manifest.enumerate import enumerate_entries
from aotgaudi.manifest.manifest import Manifest
from tests.specs import spec_of

BUCKETS = {"prompts": [[16, 0], [16, 3], [32, 8]], "decodes": [[1, 4], [2, 3], [2, 16]]}


def tuned(**changes: Any) -> Any:
    return spec_of(bucketing={"strategy": "tuned", "tuned": {**BUCKETS, **changes}})


def test_the_entries_are_those_that_are_listed() -> None:
    entries = enumerate_entries(tuned())

    assert [one for one in entries if isinstance(one, PromptEntry)] == [
        PromptEntry(1, 16, 0), PromptEntry(1, 16, 3), PromptEntry(1, 32, 8),
    ]  # fmt: skip
    assert [one for one in entries if isinstance(one, DecodeEntry)] == [
        DecodeEntry(1, 1, 4), DecodeEntry(2, 1, 3), DecodeEntry(2, 1, 16),
    ]  # fmt: skip


def test_a_list_that_is_not_closed_is_closed_as_any_other() -> None:
    spec = tuned(prompts=[[16, 0]], decodes=[[1, 1]])

    assert coverage_of(Manifest.of(spec)).is_closed


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_has_the_strategy(version: str) -> None:
    spec = tuned()
    strategy = find_strategy(version, "tuned")
    inputs = BucketingInputs.from_spec(spec.limits, spec.bucketing)

    assert strategy.prompt_table(inputs) == ((1, 16, 0), (1, 16, 3), (1, 32, 8))
    assert (
        strategy.decode_table(inputs)
        == strategy.decode_seed_table(inputs)
        == ((1, 1, 4), (2, 1, 3), (2, 1, 16))
    )


@pytest.mark.parametrize(
    ("bucketing", "problem"),
    [
        ({"strategy": "tuned"}, "bucketing.tuned: is missing"),
        ({"strategy": "linear", "tuned": BUCKETS}, "bucketing.tuned: is given with strategy 'linear'"),
        ({"strategy": "tuned", "tuned": {**BUCKETS, "prompts": []}}, "bucketing.tuned.prompts: is empty"),
        (
            {"strategy": "tuned", "tuned": {**BUCKETS, "decodes": [[2, 3], [1, 4]]}},
            "bucketing.tuned.decodes: is not in order",
        ),
        (
            {"strategy": "tuned", "tuned": {**BUCKETS, "decodes": [[1, 4], [1, 4]]}},
            "bucketing.tuned.decodes: is not in order",
        ),
        (
            {"strategy": "tuned", "tuned": {**BUCKETS, "decodes": [[1, 0]]}},
            "bucketing.tuned.decodes: has [1, 0]",
        ),
        (
            {"strategy": "tuned", "tuned": {**BUCKETS, "prompts": [[0, 4]]}},
            "bucketing.tuned.prompts: has [0, 4]",
        ),
    ],
)
def test_a_wrong_table_is_refused(bucketing: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec_of(bucketing=bucketing)

    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize(
    ("buckets", "problem"),
    [
        ({"prompts": [[33, 0]]}, "has 33, more than max_num_batched_tokens"),
        ({"prompts": [[16, 9]]}, "has 9, more than the blocks of max_model_len"),
        ({"decodes": [[3, 4]]}, "has 3, more than max_num_seqs"),
        ({"decodes": [[1, 25]]}, "has 25, more than num_blocks"),
    ],
)
def test_buckets_that_no_step_needs_are_refused(buckets: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        enumerate_entries(tuned(**buckets))


def test_a_vllm_server_is_told_to_read_them_from_a_file() -> None:
    with pytest.raises(SpecError, match=r"bucketing\.strategy: is 'tuned', with engine 'vllm'"):
        spec_of(bucketing={"strategy": "tuned", "tuned": BUCKETS}, scheduler={"engine": "vllm"})


def test_the_buckets_are_given_to_such_a_server_as_a_file() -> None:
    found = bucket_file_of(tuned())

    assert found.spec.bucketing.strategy == "file"
    assert {(1, 16, 0), (1, 16, 3)} <= set(found.prompt)
    assert {(1, 1, 4), (2, 1, 3), (2, 1, 16)} <= set(found.decode)


EXPONENTIAL = find_strategy("vllm-gaudi@091bbad", "exponential")
PRODUCTS = [name for name in VERSIONS if name.startswith("vllm-gaudi@") and name != "vllm-gaudi@v0.10.1"]
THREE_DIMENSIONAL = [name for name, version in VERSIONS.items() if version.lookup is not None]
LONG = BucketingInputs(
    max_num_seqs=256,
    max_num_prefill_seqs=1,
    block_size=128,
    max_num_batched_tokens=131_072,
    max_model_len=131_072,
    num_blocks=5746,
)


@st.composite
def ordinary_inputs(draw: st.DrawFn) -> BucketingInputs:
    """Draws limits with which every version has some bucket."""
    block_size = draw(st.sampled_from([1, 16, 128, 256]))
    max_model_len = block_size * draw(st.integers(2, 200))
    return BucketingInputs(
        max_num_seqs=draw(st.integers(1, 64)),
        max_num_prefill_seqs=draw(st.integers(1, 4)),
        block_size=block_size,
        max_num_batched_tokens=draw(st.integers(max(2, block_size), 200 * block_size)),
        max_model_len=max_model_len,
        num_blocks=draw(st.integers(max_model_len // block_size, 5000)),
        contiguous_pa=draw(st.booleans()),
        prefix_caching=draw(st.booleans()),
        num_speculative_tokens=draw(st.integers(0, 2)),
        skip_decode_block_clamp=draw(st.booleans()),
    )


@st.composite
def strategies_of(draw: st.DrawFn, versions: list[str]) -> Strategy:
    version = draw(st.sampled_from(versions))
    names = [name for name in VERSIONS[version].strategies if name != "file"]
    return VERSIONS[version].strategies[draw(st.sampled_from(names))]


@given(strategies_of(THREE_DIMENSIONAL), ordinary_inputs())
def test_tables_are_deterministic_and_ascend(strategy: Strategy, inputs: BucketingInputs) -> None:
    for make in (strategy.prompt_table, strategy.decode_table, strategy.decode_seed_table):
        try:
            table = make(inputs)
        except SpecError as error:
            with pytest.raises(SpecError, match=f"^{error.where}"):
                make(dataclasses.replace(inputs))
        else:
            assert table == make(dataclasses.replace(inputs))
            assert list(table) == sorted(table)


@given(strategies_of(PRODUCTS), ordinary_inputs())
def test_tables_of_vllm_gaudi_have_no_repetition(strategy: Strategy, inputs: BucketingInputs) -> None:
    for make in (strategy.prompt_table, strategy.decode_table):
        try:
            table = make(inputs)
        except SpecError:
            continue
        assert len(set(table)) == len(table)


@given(strategies_of(PRODUCTS), ordinary_inputs())
def test_prompt_buckets_of_vllm_gaudi_are_within_the_limits(
    strategy: Strategy, inputs: BucketingInputs
) -> None:
    try:
        table = strategy.prompt_table(inputs)
    except SpecError:
        return
    for batch_size, query_len, context in table:
        assert 1 <= query_len <= inputs.max_model_len
        assert batch_size * query_len <= inputs.max_num_batched_tokens
        assert 0 <= context <= inputs.max_blocks_per_seq


@given(ordinary_inputs())
def test_newest_decode_buckets_are_within_the_limits(inputs: BucketingInputs) -> None:
    for batch_size, query_len, num_blocks in EXPONENTIAL.decode_seed_table(inputs):
        assert query_len == 1
        assert 1 <= batch_size <= inputs.max_num_seqs
        if inputs.contiguous_pa:
            assert 1 <= num_blocks <= inputs.num_blocks
        else:
            assert batch_size <= num_blocks <= batch_size * inputs.max_blocks_per_seq


@given(ordinary_inputs())
def test_speculation_only_adds_decode_buckets_of_more_rows(inputs: BucketingInputs) -> None:
    seeds, table = set(EXPONENTIAL.decode_seed_table(inputs)), EXPONENTIAL.decode_table(inputs)
    factor = inputs.num_speculative_tokens + 1

    assert seeds <= set(table)
    assert {batch_size % factor for batch_size, _, _ in set(table) - seeds} <= {0}


def test_the_largest_limits_of_a_spec_end_soon() -> None:
    """No list of limits that the spec allows makes time or memory explode."""
    most = 2**31 - 1
    huge = BucketingInputs(
        max_num_seqs=most,
        max_num_prefill_seqs=most,
        block_size=1,
        max_num_batched_tokens=most,
        max_model_len=most,
        num_blocks=most,
    )

    started = time.monotonic()
    for version in VERSIONS.values():
        for name in version.strategies.keys() - {"file"}:
            for make in (version.strategies[name].prompt_table, version.strategies[name].decode_table):
                with contextlib.suppress(SpecError):
                    assert len(make(huge)) <= MAX_BUCKETS

    assert time.monotonic() - started < 60


def test_a_table_of_too_many_buckets_is_refused_with_its_size() -> None:
    linear = find_strategy("vllm-gaudi@091bbad", "linear")
    inputs = dataclasses.replace(LONG, block_size=32)

    with pytest.raises(SpecError, match=r"bucketing\.prompt: gives 16,\d{3},\d{3} prompt buckets"):
        linear.prompt_table(inputs)


@pytest.mark.parametrize(
    ("version", "strategy", "sizes"),
    [
        ("vllm-gaudi@091bbad", "exponential", (33, 125)),
        ("vllm-gaudi@091bbad", "linear", (1_047_553, 9488)),
        ("vllm-hpu-extension@8211e0b", "linear", (524_800, 568)),
        ("vllm-hpu-extension@ad55828", "exponential", (15_384, 126)),
    ],
)
def test_long_contexts_have_as_many_buckets_as_upstream_counts(
    version: str, strategy: str, sizes: tuple[int, int]
) -> None:
    tables = find_strategy(version, strategy)

    assert (len(tables.prompt_table(LONG)), len(tables.decode_table(LONG))) == sizes
