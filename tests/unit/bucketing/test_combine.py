"""The product of vllm-gaudi, against a walk over all combinations."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.combine import (
    ProductRules,
    check_mamba,
    combine_decode,
    combine_prompt,
    edge_context,
    filter_decode,
    filter_prompt,
    with_speculation,
)
from aotgaudi.bucketing.strategy import (
    MAX_BUCKETS,
    Bucket,
    BucketingInputs,
    Ranges,
    check_num_buckets,
    check_num_values,
    collector_paused,
)
from aotgaudi.errors import SpecError
from aotgaudi.spec.bucketing import AxisBounds, PromptBounds, SlidingSpec

NEWEST = ProductRules()


def inputs_with(**changes: object) -> BucketingInputs:
    values: dict[str, object] = {
        "max_num_seqs": 4,
        "max_num_prefill_seqs": 2,
        "block_size": 128,
        "max_num_batched_tokens": 8192,
        "max_model_len": 8192,
        "num_blocks": 64,
    }
    return BucketingInputs(**{**values, **changes})  # type: ignore[arg-type]


rules_of_versions = st.builds(
    ProductRules,
    edge=st.sampled_from(["none", "unbounded", "bounded"]),
    prompt_fit=st.sampled_from(["total", "apart"]),
    mamba_rounding=st.sampled_from(["never", "always", "explicit"]),
    mamba_floors_decode=st.booleans(),
)
values = st.lists(st.integers(1, 40), min_size=1, max_size=5).map(tuple)
contexts = st.lists(st.integers(0, 80), min_size=1, max_size=6).map(lambda found: tuple(sorted(found)))


@st.composite
def small_inputs(draw: st.DrawFn) -> BucketingInputs:
    ctx_max = draw(st.none() | st.integers(0, 80))
    return inputs_with(
        block_size=draw(st.sampled_from([200, 512])),
        max_num_batched_tokens=draw(st.integers(1, 40)) * 200,
        max_model_len=draw(st.sampled_from([150, 3000, 8191, 8192, 10_000])),
        num_blocks=draw(st.integers(1, 90)),
        contiguous_pa=draw(st.booleans()),
        merged_prefill=draw(st.booleans()),
        mamba_chunk_size=draw(st.sampled_from([0, 300])),
        mamba_chunk_size_is_explicit=draw(st.booleans()),
        sliding=draw(st.none() | st.just(SlidingSpec(threshold=2000, slice_len=400))),
        prompt=PromptBounds(num_ctx_blocks=AxisBounds(max=ctx_max)),
    )


@st.composite
def prompt_ranges(draw: st.DrawFn) -> Ranges:
    query_lens = sorted(200 * value for value in draw(values))
    return Ranges(tuple(sorted(draw(values))), tuple(query_lens), draw(contexts))


def kept_prompts(ranges: Ranges, inputs: BucketingInputs, rules: ProductRules) -> Iterator[Bucket]:
    """Walks all combinations in upstream's order, as the rules are written."""
    chunk = inputs.mamba_chunk_size
    rounds = rules.mamba_rounding == "always" or (
        rules.mamba_rounding == "explicit" and inputs.mamba_chunk_size_is_explicit
    )
    for batch, first in itertools.product(ranges.batch_sizes, ranges.contexts):
        context = first
        for query in ranges.query_lens:
            if chunk and rounds:
                query = -(-query // chunk) * chunk  # noqa: PLW2901
            if rules.edge != "none" and inputs.max_model_len >= 8192 and first == max(ranges.contexts):
                edge, bound = (inputs.max_model_len - query) // inputs.block_size, inputs.prompt_ctx_max
                if edge >= 0 and (rules.edge == "unbounded" or bound is None or edge < bound):
                    context = edge
            if fits(batch, query, context, inputs, rules):
                yield batch, query, context


def fits(batch: int, query: int, context: int, inputs: BucketingInputs, rules: ProductRules) -> bool:
    if inputs.merged_prefill:
        return context <= 2 * ((inputs.max_model_len - query // 2) // inputs.block_size)
    if rules.prompt_fit == "total":
        in_model = query + context * inputs.block_size <= inputs.max_model_len
    else:
        in_model = context <= -(-(inputs.max_model_len - 1) // inputs.block_size)
        in_model = in_model and query <= inputs.max_model_len
    return in_model and batch * query <= inputs.max_num_batched_tokens


def kept_decodes(ranges: Ranges, inputs: BucketingInputs, rules: ProductRules) -> Iterator[Bucket]:
    contexts = list(ranges.contexts)
    if inputs.contiguous_pa and contexts[-1] < inputs.num_blocks:
        contexts.append(inputs.num_blocks)
    for batch, context in itertools.product(ranges.batch_sizes, contexts):
        if not inputs.contiguous_pa and batch > context:
            continue
        most = context
        if inputs.mamba_chunk_size and rules.mamba_floors_decode:
            most = batch * (inputs.max_model_len // inputs.block_size)
        elif not inputs.contiguous_pa:
            most = batch * -(-inputs.max_model_len // inputs.block_size)
        yield batch, 1, min(context, most)


@given(prompt_ranges(), small_inputs(), rules_of_versions)
def test_prompt_table_equals_a_walk_over_all_combinations(
    ranges: Ranges, inputs: BucketingInputs, rules: ProductRules
) -> None:
    expected = sorted(set(kept_prompts(ranges, inputs, rules)))
    if not expected:
        with pytest.raises(SpecError, match="leave no prompt bucket"):
            combine_prompt(ranges, inputs, rules)
        return

    if inputs.sliding:
        expected = [b for b in expected if b[2] or b[1] < 2000 or b[1] % 400 == 0]
    assert list(combine_prompt(ranges, inputs, rules)) == expected


@given(values, contexts, small_inputs(), rules_of_versions)
def test_decode_table_equals_a_walk_over_all_combinations(
    batch_sizes: tuple[int, ...], contexts: tuple[int, ...], inputs: BucketingInputs, rules: ProductRules
) -> None:
    ranges = Ranges(batch_sizes, (1,), contexts)
    expected = sorted(set(kept_decodes(ranges, inputs, rules)))
    if not expected:
        with pytest.raises(SpecError, match="leave no decode bucket"):
            combine_decode(ranges, inputs, rules)
        return

    assert list(combine_decode(ranges, inputs, rules)) == expected


@given(prompt_ranges(), small_inputs(), rules_of_versions)
def test_listed_buckets_are_filtered_like_products_but_for_edge_and_mamba(
    ranges: Ranges, inputs: BucketingInputs, rules: ProductRules
) -> None:
    product = set(itertools.product(ranges.batch_sizes, ranges.query_lens, ranges.contexts))
    expected = {bucket for bucket in product if fits(*bucket, inputs, rules)}
    if inputs.sliding:
        expected = {b for b in expected if b[2] or b[1] < 2000 or b[1] % 400 == 0}

    try:
        assert filter_prompt(product, inputs, rules) == tuple(sorted(expected))
    except SpecError:
        assert not expected


def test_listed_decode_buckets_are_capped_to_what_their_sequences_can_have() -> None:
    listed = [(4, 1, 9000), (4, 1, 3), (1, 1, 7)]

    assert filter_decode(listed, inputs_with(), NEWEST) == ((1, 1, 7), (4, 1, 256))
    assert filter_decode(listed, inputs_with(contiguous_pa=True), NEWEST) == tuple(sorted(listed))
    with pytest.raises(SpecError, match="leave no decode bucket"):
        filter_decode([(4, 1, 3)], inputs_with(), NEWEST)


def test_speculation_adds_rows_for_drafted_tokens() -> None:
    seeds = ((1, 1, 2), (2, 1, 8))

    assert with_speculation(seeds, inputs_with(), NEWEST) == seeds
    assert with_speculation(seeds, inputs_with(num_speculative_tokens=2), NEWEST) == (
        (1, 1, 2),
        (2, 1, 8),
        (3, 1, 6),
        (6, 1, 8),
        (6, 1, 24),
    )
    assert (
        with_speculation(seeds, inputs_with(num_speculative_tokens=2), ProductRules(speculates=False))
        == seeds
    )


@pytest.mark.parametrize(
    ("edge", "ctx_max", "expected"),
    [
        ("bounded", None, 62),
        ("bounded", 63, 62),
        ("bounded", 62, 5),
        ("bounded", 1, 5),
        ("unbounded", 1, 62),
    ],
)
def test_edge_rule_raises_the_context_only_below_its_bound(
    edge: str, ctx_max: int | None, expected: int
) -> None:
    """8192 - 256 tokens leave 62 blocks of 128; 5 is the context before the rule."""
    inputs = inputs_with(prompt=PromptBounds(num_ctx_blocks=AxisBounds(max=ctx_max)))
    rules = ProductRules(edge=edge)  # type: ignore[arg-type]

    assert edge_context(256, 5, inputs, rules) == expected
    assert edge_context(8193, 5, inputs, rules) == 5


def test_a_step_that_is_not_whole_mamba_chunks_is_refused_where_upstream_asks() -> None:
    inputs = inputs_with(mamba_chunk_size=300)

    check_mamba(inputs, ProductRules(mamba_divides_step=False))
    with pytest.raises(SpecError, match="a multiple of the model's mamba chunk of 300 tokens"):
        check_mamba(inputs, NEWEST)


def test_too_many_buckets_are_counted_before_any_is_made() -> None:
    ranges = Ranges((1,), tuple(range(1, 5001)), tuple(range(1000)))
    inputs = inputs_with(block_size=1, max_model_len=6000)

    with pytest.raises(SpecError, match=r"bucketing\.prompt: gives 5,000,000 prompt buckets"):
        combine_prompt(ranges, inputs, NEWEST)


def test_sizes_up_to_the_cap_are_accepted() -> None:
    check_num_buckets(MAX_BUCKETS, "decode")
    check_num_values(1_000_000, "bucketing.prompt.query_len")
    with pytest.raises(SpecError, match=r"bucketing\.prompt\.query_len: gives 1,000,001 values"):
        check_num_values(1_000_001, "bucketing.prompt.query_len")


def fail_while_paused() -> None:
    with collector_paused():
        assert not gc.isenabled()
        raise KeyError


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_is_afterwards_as_it_was_also_after_an_error(is_enabled: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with pytest.raises(KeyError):
            fail_while_paused()
        assert gc.isenabled() is is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
