"""The extension's linear tables: contexts by query, and decode contexts that end at the cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.extension import cut_contexts, extension_range
from aotgaudi.bucketing.linear import LinearAxis
from aotgaudi.bucketing.strategy import BucketingInputs
from aotgaudi.bucketing.versions import find_strategy
from aotgaudi.errors import SpecError
from aotgaudi.spec.bucketing import AxisBounds, DecodeBounds, PromptBounds

INPUTS = {
    "max_num_seqs": 4,
    "max_num_prefill_seqs": 1,
    "block_size": 128,
    "max_num_batched_tokens": 512,
    "max_model_len": 512,
    "num_blocks": 300,
}


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        # The step's tokens leave no room for the context past the end, but after short queries.
        ("vllm-hpu-extension@8211e0b", 10),
        ("vllm-hpu-extension@7717587", 10),
    ],
)
def test_prompts_have_every_context_that_the_steps_tokens_hold(version: str, expected: int) -> None:
    table = find_strategy(version, "linear").prompt_table(BucketingInputs(**INPUTS))

    assert len(table) == expected
    assert all(query_len + context * 128 <= 512 for _, query_len, context in table)


def test_older_versions_have_one_context_more_than_the_model_has_room_for() -> None:
    inputs = BucketingInputs(**{**INPUTS, "max_num_batched_tokens": 4096})

    longest = {
        version: max(find_strategy(f"vllm-hpu-extension@{version}", "linear").prompt_table(inputs))
        for version in ("8211e0b", "7717587")
    }

    assert longest == {"8211e0b": (1, 512, 1), "7717587": (1, 512, 0)}


def test_without_prefix_caching_there_is_no_context() -> None:
    inputs = BucketingInputs(**INPUTS, prefix_caching=False)

    table = find_strategy("vllm-hpu-extension@8211e0b", "linear").prompt_table(inputs)

    assert table == ((1, 128, 0), (1, 256, 0), (1, 384, 0), (1, 512, 0))


def test_decode_contexts_reach_the_end_of_a_contiguous_cache() -> None:
    strategy = find_strategy("vllm-hpu-extension@8211e0b", "linear")

    contiguous = strategy.decode_table(BucketingInputs(**INPUTS, contiguous_pa=True))
    scattered = strategy.decode_table(BucketingInputs(**INPUTS))

    assert {context for *_, context in contiguous} == {128, 256, 300}
    assert {context for *_, context in scattered} == {128, 256}


def test_decode_contexts_that_a_person_bounds_stay_within_the_cache() -> None:
    bounds = DecodeBounds(num_blocks=AxisBounds(step=200, max=1000), batch_size=AxisBounds(max=1))
    inputs = BucketingInputs(**INPUTS, contiguous_pa=True, decode=bounds)

    table = find_strategy("vllm-hpu-extension@8211e0b", "linear").decode_table(inputs)

    assert table == ((1, 1, 128), (1, 1, 200), (1, 1, 300))


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
