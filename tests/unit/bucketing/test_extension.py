"""The product of the extension, against a walk over all combinations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.extension import (
    ExtensionExponential,
    ExtensionExponentialRules,
    ExtensionRules,
    ExtensionStrategy,
)
from aotgaudi.bucketing.strategy import Bucket, BucketingInputs
from aotgaudi.bucketing.versions import find_strategy
from aotgaudi.errors import SpecError
from aotgaudi.spec.bucketing import AxisBounds, PromptBounds, SlidingSpec

CONTEXTS = (0, 1, 1, 2, 5)


@dataclass(frozen=True)
class Listed:
    """A source of given values, with the same contexts for every query."""

    batch_sizes: tuple[int, ...]
    lengths: tuple[int, ...]

    def prompt_batch_sizes(self, _inputs: BucketingInputs) -> Sequence[int]:
        return self.batch_sizes

    def query_lens(self, _inputs: BucketingInputs) -> Sequence[int]:
        return self.lengths

    def contexts(self, _query_len: int, _inputs: BucketingInputs) -> Sequence[int]:
        return CONTEXTS

    def decode_table(self, _inputs: BucketingInputs) -> tuple[Bucket, ...]:
        return ((1, 1, 7),)


def inputs_with(**changes: object) -> BucketingInputs:
    values: dict[str, object] = {
        "max_num_seqs": 4,
        "max_num_prefill_seqs": 2,
        "block_size": 128,
        "max_num_batched_tokens": 2048,
        "max_model_len": 1024,
        "num_blocks": 5761,
    }
    return BucketingInputs(**{**values, **changes})  # type: ignore[arg-type]


def walked(source: Listed, inputs: BucketingInputs, rules: ExtensionRules) -> list[Bucket]:
    contexts = CONTEXTS if inputs.prefix_caching else (0,)
    table = [(b, q, c) for b in source.batch_sizes for q in source.lengths for c in contexts]
    kept = [
        (b, q, c)
        for b, q, c in table
        if b * (q + c * inputs.block_size) <= inputs.max_num_batched_tokens
        and (q <= inputs.max_model_len or not rules.limits_query)
    ]
    found = (list(set(kept)) if rules.removes_repetitions else kept) or table
    if rules.slices and inputs.sliding:
        found = [b for b in found if b[1] < 512 or b[1] % 256 == 0]
    return sorted(found)


sources = st.builds(
    Listed,
    st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple),
    st.lists(st.integers(1, 12).map(lambda value: 128 * value), min_size=1, max_size=5).map(tuple),
)


@given(
    sources,
    st.builds(
        inputs_with,
        max_num_batched_tokens=st.integers(1, 4096),
        prefix_caching=st.booleans(),
        sliding=st.none() | st.just(SlidingSpec(threshold=512, slice_len=256)),
    ),
    st.builds(
        ExtensionRules,
        limits_query=st.booleans(),
        removes_repetitions=st.booleans(),
        slices=st.booleans(),
    ),
)
def test_prompt_table_equals_a_walk_over_all_combinations(
    source: Listed, inputs: BucketingInputs, rules: ExtensionRules
) -> None:
    strategy = ExtensionStrategy(source, rules)

    assert list(strategy.prompt_table(inputs)) == walked(source, inputs, rules)


def test_decode_table_is_that_of_the_source_with_and_without_seeds() -> None:
    strategy = ExtensionStrategy(Listed((1,), (128,)))

    assert strategy.decode_table(inputs_with()) == strategy.decode_seed_table(inputs_with()) == ((1, 1, 7),)


def test_contexts_of_1_22_are_exponential_and_small_ones_are_there_twice() -> None:
    source = ExtensionExponential()

    assert source.contexts(128, inputs_with()) == (0, 2, 3, 5, 7)
    assert source.contexts(256, inputs_with(max_model_len=512)) == (0, 2, 2)
    assert source.contexts(1024, inputs_with()) == (0,)


def test_dense_contexts_are_all_that_the_model_has_room_for() -> None:
    source = ExtensionExponential(ExtensionExponentialRules(dense_contexts=True))

    assert list(source.contexts(512, inputs_with())) == [0, 1, 2, 3, 4]
    assert list(source.contexts(2048, inputs_with())) == []


def test_a_query_that_is_longer_than_the_model_has_no_contexts() -> None:
    with pytest.raises(SpecError, match=r"max_model_len: is 1000, .* 1024 tokens \(a multiple of block_size"):
        ExtensionExponential().contexts(1024, inputs_with(max_model_len=1000))


def test_a_model_without_any_bucket_is_refused() -> None:
    strategy = find_strategy("vllm-hpu-extension@ad55828", "exponential")

    with pytest.raises(SpecError, match="leaves no prompt bucket"):
        strategy.prompt_table(inputs_with(max_model_len=100))


def test_limits_count_only_where_a_version_heeds_them() -> None:
    bounds = PromptBounds(batch_size=AxisBounds(limit=1), query_len=AxisBounds(limit=2))
    inputs = inputs_with(prompt=bounds, prefix_caching=False)

    heeding = find_strategy("vllm-hpu-extension@ad55828", "exponential").prompt_table(inputs)
    other = find_strategy("vllm-hpu-extension@8211e0b", "exponential").prompt_table(inputs)

    assert heeding == ((2, 128, 0), (2, 1024, 0))
    assert len(other) == 16


def test_too_many_combinations_are_counted_before_any_is_made() -> None:
    strategy = ExtensionStrategy(Listed(tuple(range(1, 3001)), tuple(range(1, 3001))))

    with pytest.raises(SpecError, match="gives 9,000,000 prompt buckets"):
        strategy.prompt_table(inputs_with())
