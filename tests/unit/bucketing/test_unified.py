"""Unified-attention tables: what a step can be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.strategy import BucketingInputs
from aotgaudi.bucketing.unified import UnifiedRanges
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
