"""Invariants of the tables of all versions; the numbers themselves are held by tests/golden."""

from __future__ import annotations

import contextlib
import dataclasses
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.strategy import MAX_BUCKETS, BucketingInputs, Strategy
from aotgaudi.bucketing.versions import VERSIONS, find_strategy
from aotgaudi.errors import SpecError

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
