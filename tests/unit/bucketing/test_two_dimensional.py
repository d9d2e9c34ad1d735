"""The two-dimensional tables of Gaudi 1.21: their order, and what its two releases differ in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.extension import TwoDimensionalExponential, TwoDimensionalLinear
from aotgaudi.bucketing.strategy import BucketingInputs
from aotgaudi.bucketing.versions import VERSIONS
from aotgaudi.errors import SpecError
from aotgaudi.spec.bucketing import AxisBounds, DecodeBounds, PromptBounds

OLD, NEW = TwoDimensionalLinear(False), TwoDimensionalLinear(True)

INPUTS = {
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


def test_prompts_are_in_the_order_of_their_tokens() -> None:
    assert OLD.prompt_table(BucketingInputs(**INPUTS)) == (
        (1, 128, 0),
        (2, 128, 0),
        (1, 256, 0),
        (1, 384, 0),
        (4, 128, 0),
        (2, 256, 0),
        (1, 512, 0),
        (2, 384, 0),
        (4, 256, 0),
        (2, 512, 0),
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


def test_only_the_newer_release_heeds_contiguous_paged_attention() -> None:
    contiguous = BucketingInputs(**INPUTS, contiguous_pa=True)

    assert {blocks for *_, blocks in OLD.decode_table(contiguous)} == {128}
    assert {blocks for *_, blocks in NEW.decode_table(contiguous)} == {128, 256, 300}


def test_only_the_newer_release_leaves_out_sequences_without_a_block() -> None:
    bounds = DecodeBounds(batch_size=AxisBounds(min=4), num_blocks=AxisBounds(min=2, step=4, max=8))
    inputs = BucketingInputs(**INPUTS, decode=bounds)

    assert OLD.decode_table(inputs) == ((4, 1, 2), (4, 1, 4), (4, 1, 8))
    assert NEW.decode_table(inputs) == ((4, 1, 4), (4, 1, 8))


def test_exponential_heeds_limits_and_no_other_bound() -> None:
    few = PromptBounds(query_len=AxisBounds(limit=2, min=1, max=4), batch_size=AxisBounds(limit=1))

    table = TwoDimensionalExponential(True).prompt_table(BucketingInputs(**INPUTS, prompt=few))

    assert table == ((4, 128, 0),)


def test_exponential_ends_at_the_cache_by_release() -> None:
    three = DecodeBounds(num_blocks=AxisBounds(limit=3))
    contiguous = BucketingInputs(**INPUTS, contiguous_pa=True, decode=three)

    assert max(TwoDimensionalExponential(True).decode_table(contiguous))[2] == 300
    assert max(TwoDimensionalExponential(False).decode_table(contiguous))[2] == 384


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
        OLD.decode_table(BucketingInputs(**INPUTS, **changes))


def test_both_releases_are_registered() -> None:
    for commit in ("2b4ba56", "29bc7a4"):
        assert set(VERSIONS[f"vllm-hpu-extension@{commit}"].strategies) == {"exponential", "linear"}
