"""Unified-attention tables: what a step can be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.strategy import BucketingInputs
from aotgaudi.bucketing.unified import UnifiedAxis, UnifiedRanges, unified_axes, unified_range
from aotgaudi.bucketing.versions import find_unified
from aotgaudi.errors import SpecError

inputs = st.builds(
    BucketingInputs,
    max_num_seqs=st.integers(2, 64),
    max_num_prefill_seqs=st.just(1),
    block_size=st.sampled_from([16, 128]),
    max_num_batched_tokens=st.integers(2, 8192),
    max_model_len=st.integers(2, 8192),
    num_blocks=st.integers(1, 2000),
)


def test_a_range_has_ten_points_and_zero() -> None:
    assert unified_range(UnifiedAxis(0, 256, 48)) == (0, 48, 96, 144, 256)
    # In exact arithmetic 33 were 32.
    assert unified_range(UnifiedAxis(1, 512, 1)) == (1, 2, 4, 8, 16, 33, 64, 128, 256, 512)


def test_shared_blocks_are_at_most_those_of_a_sequence_and_of_the_cache() -> None:
    numbers = {"max_num_seqs": 4, "max_num_prefill_seqs": 1, "block_size": 128, "max_num_batched_tokens": 512}

    short = unified_axes(BucketingInputs(**numbers, max_model_len=1000, num_blocks=300))
    small = unified_axes(BucketingInputs(**numbers, max_model_len=4096, num_blocks=20))

    assert (short.shared_context, short.unique_context) == (UnifiedAxis(0, 7, 4), UnifiedAxis(0, 300, 4))
    assert (small.shared_context, small.unique_context) == (UnifiedAxis(0, 20, 4), UnifiedAxis(0, 20, 4))


@given(inputs)
def test_buckets_ascend_and_are_possible_steps(inputs: BucketingInputs) -> None:
    table = UnifiedRanges().unified_table(inputs)

    assert list(table) == sorted(set(table))
    for query_len, shared, unique, is_causal in table:
        if not is_causal:
            assert query_len <= inputs.max_num_seqs
            assert shared > 0 or query_len <= unique
        assert shared * inputs.block_size // query_len <= inputs.max_model_len or shared == 0 or not is_causal


@pytest.mark.parametrize(("max_num_seqs", "max_num_batched_tokens"), [(1, 2048), (8, 1)])
def test_one_token_over_shared_blocks_is_refused(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    alone = BucketingInputs(
        max_num_seqs=max_num_seqs,
        max_num_prefill_seqs=1,
        block_size=128,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=2048,
        num_blocks=100,
    )

    with pytest.raises(SpecError, match="limits: give steps of one token over shared blocks"):
        UnifiedRanges().unified_table(alone)


def test_only_versions_with_unified_attention_have_the_strategy() -> None:
    assert isinstance(find_unified("vllm-gaudi@v0.11.2"), UnifiedRanges)
    assert isinstance(find_unified("vllm-gaudi@v0.17.1"), UnifiedRanges)
    with pytest.raises(SpecError, match=r"bucketing\.strategy: is 'unified'"):
        find_unified("vllm-gaudi@091bbad")
