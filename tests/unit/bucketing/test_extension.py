"""The extension's tables in three and two dimensions, against a walk over all combinations."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.extension import (
    ExtensionExponential,
    ExtensionRules,
    ExtensionStrategy,
    TwoDimensionalExponential,
    TwoDimensionalLinear,
    cut_contexts,
    extension_range,
)
from aotgaudi.bucketing.linear import LinearAxis
from aotgaudi.bucketing.strategy import Bucket, BucketingInputs
from aotgaudi.bucketing.versions import find_strategy
from aotgaudi.errors import SpecError
from aotgaudi.spec.bucketing import AxisBounds, DecodeBounds, PromptBounds, SlidingSpec

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


INPUTS = {
    "max_num_seqs": 4,
    "max_num_prefill_seqs": 1,
    "block_size": 128,
    "max_num_batched_tokens": 512,
    "max_model_len": 512,
    "num_blocks": 300,
}


@given(st.lists(st.integers(1, 100), unique=True), st.integers(1, 100))
def test_cut_contexts_end_with_the_first_one_that_reaches_the_cache(values: list[int], end: int) -> None:
    contexts = sorted(values)

    cut = list(cut_contexts(contexts, end))

    assert cut == [c for c in contexts if c < end] + [end] * any(c >= end for c in contexts)


def test_a_range_from_zero_is_refused() -> None:
    with pytest.raises(SpecError, match=r"here\.min: is 0 \(at least 1 in this version\)"):
        extension_range(LinearAxis(0, 1, 4), "here")


def test_more_contexts_than_can_be_listed_are_refused() -> None:
    bounds = PromptBounds(query_len=AxisBounds(min=2**30, step=2**30))
    inputs = BucketingInputs(
        **{**INPUTS, "block_size": 1, "max_model_len": 2**31 - 1, "max_num_batched_tokens": 2**31 - 1},
        prompt=bounds,
    )

    with pytest.raises(SpecError, match=r"bucketing\.prompt\.num_ctx_blocks: gives .* more than 1,000,000"):
        find_strategy("vllm-hpu-extension@8211e0b", "linear").prompt_table(inputs)


def test_a_table_that_is_too_large_is_refused_before_its_contexts_are_listed() -> None:
    lengths = {"block_size": 16, "max_model_len": 48_000, "max_num_batched_tokens": 48_000}
    inputs = BucketingInputs(**{**INPUTS, **lengths, "max_num_prefill_seqs": 1, "prefix_caching": True})
    tracemalloc.start()

    with pytest.raises(SpecError, match=r"bucketing\.prompt: gives 4,\d{3},\d{3} prompt buckets, more than"):
        find_strategy("vllm-hpu-extension@7717587", "linear").prompt_table(inputs)

    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most_bytes < 10_000_000  # The numbers alone would take fifteen times that.


OLD, NEW = TwoDimensionalLinear(False), TwoDimensionalLinear(True)

INPUTS_2D = {
    "max_num_seqs": 4,
    "max_num_prefill_seqs": 4,
    "block_size": 128,
    "max_num_batched_tokens": 1024,
    "max_model_len": 512,
    "num_blocks": 300,
}

inputs = st.builds(
    BucketingInputs,
    max_num_seqs=st.integers(1, 64),
    max_num_prefill_seqs=st.integers(1, 8),
    block_size=st.sampled_from([16, 128]),
    max_num_batched_tokens=st.integers(128, 4096),
    max_model_len=st.integers(128, 4096),
    num_blocks=st.integers(128, 2000),
    contiguous_pa=st.booleans(),
)


@given(inputs)
def test_every_table_is_in_the_order_of_products_without_repetition(inputs: BucketingInputs) -> None:
    for strategy in (OLD, NEW, TwoDimensionalExponential(False), TwoDimensionalExponential(True)):
        prompt = [(batch * query, query) for batch, query, _ in strategy.prompt_table(inputs)]
        decode = [(batch * blocks, blocks) for batch, _, blocks in strategy.decode_table(inputs)]
        assert prompt == sorted(set(prompt))
        assert decode == sorted(set(decode))
        assert strategy.decode_seed_table(inputs) == strategy.decode_table(inputs)


@given(inputs)
def test_prompts_are_within_the_steps_tokens_unless_none_is(inputs: BucketingInputs) -> None:
    tokens = [batch * query for batch, query, _ in NEW.prompt_table(inputs)]

    assert max(tokens) <= inputs.max_num_batched_tokens or min(tokens) > inputs.max_num_batched_tokens


def test_only_the_newer_release_leaves_out_sequences_without_a_block() -> None:
    bounds = DecodeBounds(batch_size=AxisBounds(min=4), num_blocks=AxisBounds(min=2, step=4, max=8))
    inputs = BucketingInputs(**INPUTS_2D, decode=bounds)

    assert OLD.decode_table(inputs) == ((4, 1, 2), (4, 1, 4), (4, 1, 8))
    assert NEW.decode_table(inputs) == ((4, 1, 4), (4, 1, 8))


def test_exponential_heeds_limits_and_no_other_bound() -> None:
    few = PromptBounds(query_len=AxisBounds(limit=2, min=1, max=4), batch_size=AxisBounds(limit=1))

    table = TwoDimensionalExponential(True).prompt_table(BucketingInputs(**INPUTS_2D, prompt=few))

    assert table == ((4, 128, 0),)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"decode": DecodeBounds(batch_size=AxisBounds(min=8))},
            r"bucketing\.decode\.batch_size: min is 8, max is 4",
        ),
        (
            {"decode": DecodeBounds(num_blocks=AxisBounds(min=0))},
            r"bucketing\.decode\.num_blocks\.min: is 0",
        ),
        (
            {"decode": DecodeBounds(num_blocks=AxisBounds(step=1, max=2**31 - 1))},
            r"bucketing\.decode\.num_blocks: gives",
        ),
    ],
)
def test_bounds_that_give_no_table_are_refused(changes: dict[str, DecodeBounds], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        OLD.decode_table(BucketingInputs(**INPUTS_2D, **changes))
