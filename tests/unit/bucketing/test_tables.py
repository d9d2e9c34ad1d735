"""Invariants of the tables; the numbers themselves are held by tests/golden."""

from __future__ import annotations

import dataclasses
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.exponential import ExponentialAxis, ceil_log2, exponential_range
from aotgaudi.bucketing.filters import edge_context
from aotgaudi.bucketing.inputs import BucketingInputs
from aotgaudi.bucketing.versions import VERSIONS, decode_buckets, find_strategy, prompt_buckets
from aotgaudi.errors import SpecError
from aotgaudi.spec.bucketing import BucketingSpec

EXPONENTIAL = find_strategy("vllm-gaudi@091bbad", "exponential")


@st.composite
def ordinary_inputs(draw: st.DrawFn) -> BucketingInputs:
    block_size = draw(st.sampled_from([1, 16, 128, 256]))
    max_model_len = draw(st.integers(block_size + 1, 200 * block_size))
    return BucketingInputs(
        max_num_seqs=draw(st.integers(1, 64)),
        max_num_prefill_seqs=draw(st.integers(1, 4)),
        block_size=block_size,
        max_num_batched_tokens=draw(st.integers(max(2, block_size), 200 * block_size)),
        max_model_len=max_model_len,
        num_blocks=draw(st.integers(-(-max_model_len // block_size), 5000)),
        contiguous_pa=draw(st.booleans()),
        prompt_query_min_one=draw(st.booleans()),
        prompt_ctx_max=draw(st.none() | st.integers(1, 64)),
    )


@given(ordinary_inputs())
def test_tables_are_deterministic_ascending_and_without_repetition(inputs: BucketingInputs) -> None:
    for make in (prompt_buckets, decode_buckets):
        table = make(inputs, EXPONENTIAL)
        assert table == make(dataclasses.replace(inputs), EXPONENTIAL)
        assert list(table) == sorted(set(table))


@given(ordinary_inputs())
def test_prompt_buckets_are_within_the_limits(inputs: BucketingInputs) -> None:
    for batch_size, query_len, context in prompt_buckets(inputs, EXPONENTIAL):
        assert 1 <= batch_size <= inputs.max_num_prefill_seqs
        assert 1 <= query_len <= inputs.max_model_len
        assert batch_size * query_len <= inputs.max_num_batched_tokens
        assert 0 <= context <= inputs.max_blocks_per_seq


@given(ordinary_inputs())
def test_decode_buckets_are_within_the_limits(inputs: BucketingInputs) -> None:
    for batch_size, query_len, num_blocks in decode_buckets(inputs, EXPONENTIAL):
        assert query_len == 1
        assert 1 <= batch_size <= inputs.max_num_seqs
        if inputs.contiguous_pa:
            assert 1 <= num_blocks <= inputs.num_blocks
        else:
            assert batch_size <= num_blocks <= batch_size * inputs.max_blocks_per_seq


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        # Exact arithmetic has 512 and 1024, and the powers of two.
        (ExponentialAxis(64, 64, 2048, 11), (64, 128, 192, 256, 384, 576, 768, 1088, 1472, 2048)),
        (ExponentialAxis(0, 1, 1024, 11), (0, 1, 2, 4, 9, 17, 32, 65, 129, 257, 513, 1024)),
        # The last point, 4, is above the maximum and is replaced by it.
        (ExponentialAxis(1, 2, 3, 3), (1, 2, 3)),
        (ExponentialAxis(1, 2, 7, 1), (7,)),
    ],
)
def test_range_keeps_the_order_of_double_precision_operations(
    axis: ExponentialAxis, expected: tuple[int, ...]
) -> None:
    assert exponential_range(axis, contiguous_pa=False) == expected


@pytest.mark.parametrize(
    ("ctx_max", "expected"),
    [(None, 62), (63, 62), (62, 5), (1, 5)],
)
def test_edge_rule_raises_the_context_only_below_its_bound(ctx_max: int | None, expected: int) -> None:
    """8192 - 256 tokens leave 62 blocks of 128; 5 is the context before the rule."""
    inputs = BucketingInputs(
        max_num_seqs=1,
        max_num_prefill_seqs=1,
        block_size=128,
        max_num_batched_tokens=8192,
        max_model_len=8192,
        num_blocks=64,
        prompt_ctx_max=ctx_max,
    )

    assert edge_context(256, 5, inputs) == expected
    assert edge_context(8193, 5, inputs) == 5


@pytest.mark.parametrize(("value", "expected"), [(1, 0), (2, 1), (3, 2), (4, 2), (8192, 13), (8193, 14)])
def test_ceil_log2(value: int, expected: int) -> None:
    assert ceil_log2(value) == expected


def test_step_of_one_token_leaves_no_query_lengths() -> None:
    inputs = BucketingInputs(
        max_num_seqs=1,
        max_num_prefill_seqs=1,
        block_size=1,
        max_num_batched_tokens=1,
        max_model_len=4,
        num_blocks=4,
    )

    with pytest.raises(SpecError, match="max_num_batched_tokens of at least 2"):
        prompt_buckets(inputs, EXPONENTIAL)


def test_the_registry_and_the_spec_name_the_same_strategies_and_versions() -> None:
    fields = BucketingSpec.model_fields
    assert set(typing.get_args(fields["version"].annotation)) == set(VERSIONS)
    known = {name for version in VERSIONS.values() for name in version.strategies}
    assert set(typing.get_args(fields["strategy"].annotation)) == known


@pytest.mark.parametrize(
    ("version", "strategy", "expected"),
    [
        ("vllm-gaudi@nowhere", "exponential", r"bucketing\.version.*vllm-gaudi@091bbad"),
        ("vllm-gaudi@091bbad", "nothing", r"bucketing\.strategy.*exponential"),
    ],
)
def test_an_unknown_strategy_or_version_is_an_error_that_names_the_known(
    version: str, strategy: str, expected: str
) -> None:
    with pytest.raises(SpecError, match=expected):
        find_strategy(version, strategy)
