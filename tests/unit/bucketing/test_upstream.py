"""Upstream's look-up and warm-up, against what its code says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.strategy import Bucket, BucketingInputs
from aotgaudi.bucketing.upstream import (
    LookupRules,
    UpstreamLookup,
    calc_fallback_value,
    cold_decodes,
    cold_prompts,
    first_covering,
)
from aotgaudi.bucketing.versions import HISTORY, VERSIONS, GaudiVersion, find_strategy, open_upstream_lookup
from aotgaudi.errors import SpecError
from aotgaudi.spec.bucketing import SlidingSpec

NEWEST = "vllm-gaudi@091bbad"
buckets = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(0, 5))


def inputs_with(**changes: object) -> BucketingInputs:
    values: dict[str, object] = {
        "max_num_seqs": 8,
        "max_num_prefill_seqs": 1,
        "block_size": 128,
        "max_num_batched_tokens": 8192,
        "max_model_len": 8192,
        "num_blocks": 500,
    }
    return BucketingInputs(**{**values, **changes})  # type: ignore[arg-type]


def rules_of(version: str) -> LookupRules:
    rules = VERSIONS[version].lookup
    assert rules is not None
    return rules


@given(st.lists(buckets), buckets)
def test_first_covering_is_the_least_of_all_that_cover(table: list[Bucket], wanted: Bucket) -> None:
    covering = [b for b in table if all(have >= want for have, want in zip(b, wanted, strict=True))]

    assert first_covering(sorted(table), wanted) == min(covering, default=None)


@pytest.mark.parametrize(
    ("version", "prompt", "decode"),
    [
        (NEWEST, (4, 6688, 64), (8, 1, 400)),
        ("vllm-gaudi@v0.20.0rc0", (4, 6688, 160), (8, 1, 400)),
        ("vllm-gaudi@v0.16.0", (4, 6688, 160), (8, 1, 500)),
        ("vllm-gaudi@v0.13.0", (4, 6688, 160), (12, 1, 500)),
        ("vllm-hpu-extension@8211e0b", (4, 6688, 160), (12, 1, 500)),
        ("vllm-hpu-extension@ad55828", (4, 6528, 66), (16, 1, 1200)),
    ],
)
def test_a_step_without_a_bucket_adds_one_that_depends_on_the_version(
    version: str, prompt: Bucket, decode: Bucket
) -> None:
    lookup = UpstreamLookup(rules_of(version), inputs_with(), (), ((1, 1, 400),))

    assert lookup.find_prompt(3, 6500, 65) == (prompt, True)
    assert lookup.find_prompt(*prompt) == (prompt, False)
    assert lookup.find_decode(9, 1200) == (decode, True)


def test_the_newest_version_adds_a_decode_bucket_once_older_ones_again_and_again() -> None:
    newest, older = (
        UpstreamLookup(rules_of(version), inputs_with(), (), ((8, 1, 100),))
        for version in (NEWEST, "vllm-gaudi@v0.17.1")
    )

    assert [newest.find_decode(9, 500) for _ in range(2)] == [((8, 1, 100), False)] * 2
    assert [older.find_decode(9, 500) for _ in range(2)] == [((8, 1, 100), True)] * 2


def test_long_queries_are_rounded_to_slices_where_attention_is_sliced() -> None:
    sliding = SlidingSpec(threshold=4096, slice_len=1024)
    sliced = UpstreamLookup(rules_of(NEWEST), inputs_with(sliding=sliding), (), ())
    unaware = UpstreamLookup(rules_of("vllm-gaudi@v0.10.1"), inputs_with(sliding=sliding), (), ())

    assert sliced.find_prompt(1, 9000, 0).bucket == (1, 9216, 0)
    assert sliced.find_prompt(1, 4000, 0).bucket == (1, 9216, 0)
    assert unaware.find_prompt(1, 9000, 0).bucket == (1, 8192, 0)


def test_query_lengths_grow_with_the_mamba_chunk_from_v0_17() -> None:
    inputs = inputs_with(mamba_chunk_size=256)

    assert UpstreamLookup(rules_of(NEWEST), inputs, (), ()).find_prompt(1, 300, 0).bucket == (1, 1792, 0)
    older = UpstreamLookup(rules_of("vllm-gaudi@v0.16.0"), inputs, (), ())
    assert older.find_prompt(1, 300, 0).bucket == (1, 448, 0)


def test_seed_buckets_are_tried_first_when_asked_for() -> None:
    seeds, table = ((4, 1, 16),), ((3, 1, 16), (4, 1, 16), (8, 1, 16))
    newest = UpstreamLookup(rules_of(NEWEST), inputs_with(), (), table, seeds)
    older = UpstreamLookup(rules_of("vllm-gaudi@v0.11.2"), inputs_with(), (), table, seeds)

    assert newest.find_decode(2, 12) == ((3, 1, 16), False)
    assert newest.find_decode(2, 12, seeds_first=True) == ((4, 1, 16), False)
    assert newest.find_decode(5, 12, seeds_first=True) == ((8, 1, 16), False)
    assert older.find_decode(2, 12, seeds_first=True) == ((3, 1, 16), False)


def test_a_look_up_opens_with_the_tables_of_a_strategy() -> None:
    inputs = inputs_with(num_speculative_tokens=1)
    strategy = find_strategy(NEWEST, "exponential")
    lookup = open_upstream_lookup(NEWEST, "exponential", inputs)

    for batch_size, _, num_blocks in strategy.decode_table(inputs):
        assert not lookup.find_decode(batch_size, num_blocks).is_added
    for bucket in strategy.prompt_table(inputs):
        assert not lookup.find_prompt(*bucket).is_added


def test_two_dimensional_versions_have_no_look_up() -> None:
    with pytest.raises(SpecError, match=r"bucketing\.version: .*three-dimensional"):
        open_upstream_lookup("vllm-hpu-extension@29bc7a4", "linear", inputs_with())


@given(st.integers(2, 2**31), st.integers(1, 4096))
def test_fallback_value_is_a_multiple_of_the_step_and_not_less(value: int, base_step: int) -> None:
    found = calc_fallback_value(value, base_step)

    assert found >= value
    assert found % base_step == 0


GAUDI = [version for version in HISTORY if isinstance(version, GaudiVersion)]
NEWEST_VERSION = GAUDI[0]
BEFORE = VERSIONS["vllm-gaudi@v0.17.1"]


def inputs_of(**changes: object) -> BucketingInputs:
    values: dict[str, object] = {
        "max_num_seqs": 4,
        "max_num_prefill_seqs": 1,
        "block_size": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 32,
        "num_blocks": 16,
    }
    return BucketingInputs(**{**values, **changes})  # type: ignore[arg-type]


def warmed_prompts(table: list[Bucket], inputs: BucketingInputs) -> set[Bucket]:
    """A dummy for each bucket, cut to the model's length as hpu_model_runner.py 5637-5651 does, and looked up."""
    lookup = UpstreamLookup(NEWEST_VERSION.lookup, inputs, table, ())
    compiled = set()
    for size, query, blocks in reversed(table):
        is_too_long = query + blocks * inputs.block_size > inputs.max_model_len
        left = max(0, (inputs.max_model_len - query) // inputs.block_size)
        compiled.add(lookup.find_prompt(size, query, left if is_too_long else blocks).bucket)
    return compiled


@given(st.sets(st.tuples(st.just(1), st.integers(2, 32), st.integers(0, 8)), min_size=1))
def test_prompts_are_those_that_a_dummy_is_looked_up_to(table: set[Bucket]) -> None:
    ascending, inputs = sorted(table), inputs_of()

    assert set(
        cold_prompts(ascending, NEWEST_VERSION.product, NEWEST_VERSION.lookup, inputs)
    ) == table - warmed_prompts(ascending, inputs)


def test_of_contexts_that_fill_the_model_only_the_smallest_is_compiled() -> None:
    table = [(1, 16, 2), (1, 16, 4), (1, 16, 5), (1, 16, 7), (2, 16, 9)]

    cold = [(1, 16, 5), (1, 16, 7), (2, 16, 9)]  # Several prompts after a context run one by one.
    assert list(cold_prompts(table, NEWEST_VERSION.product, NEWEST_VERSION.lookup, inputs_of())) == cold
    assert isinstance(BEFORE, GaudiVersion)
    assert list(cold_prompts(table, BEFORE.product, BEFORE.lookup, inputs_of())) == []


@pytest.mark.parametrize(
    ("version", "cold"),
    [
        (NEWEST, [(2, 8, 1), (2, 16, 0), (3, 8, 0)]),
        ("vllm-gaudi@v0.14.1", [(2, 8, 1), (2, 16, 0), (3, 8, 0)]),
        ("vllm-gaudi@v0.13.0", [(2, 16, 0), (3, 8, 0)]),
    ],
)
def test_several_dummies_share_a_step_if_it_has_room_and_nothing_came_before(
    version: str, cold: list[Bucket]
) -> None:
    """Two rows of 16 do not fit 24 tokens, and the look-up pads three rows of 8 to four."""
    rules = VERSIONS[version]
    assert isinstance(rules, GaudiVersion)
    table = [(1, 8, 0), (1, 8, 1), (1, 16, 0), (1, 24, 0), (2, 8, 0), (2, 8, 1), (2, 16, 0), (3, 8, 0)]
    inputs = inputs_of(max_num_prefill_seqs=2, max_num_batched_tokens=24)

    assert list(cold_prompts(table, rules.product, rules.lookup, inputs)) == cold


def test_prompts_of_models_with_mamba_layers_never_share_a_step_after_v0_26() -> None:
    table, inputs = [(1, 8, 0), (2, 8, 0)], inputs_of(max_num_prefill_seqs=2, mamba_chunk_size=8)

    for version, cold in ((NEWEST, [(2, 8, 0)]), ("vllm-gaudi@v0.26.0", [])):
        rules = VERSIONS[version]
        assert isinstance(rules, GaudiVersion)
        assert list(cold_prompts(table, rules.product, rules.lookup, inputs)) == cold


@pytest.mark.parametrize("version", GAUDI)
@given(st.sets(st.tuples(st.integers(1, 4), st.just(1), st.integers(1, 16)), min_size=1))
def test_decodes_without_contiguous_blocks_are_all_compiled(
    version: GaudiVersion, table: set[Bucket]
) -> None:
    assert list(cold_decodes(sorted(table), version.lookup, inputs_of())) == []


@pytest.mark.parametrize(
    ("version", "cold"),
    [
        ("vllm-gaudi@v0.19.1", []),
        ("vllm-gaudi@v0.17.1", [(8, 1, 8)]),
        ("vllm-gaudi@v0.13.0", []),
    ],
)
def test_a_dummy_of_more_blocks_than_the_cache_is_padded_to_another_batch(
    version: str, cold: list[Bucket]
) -> None:
    """Two blocks a sequence: of 8 sequences 16, and the cache has 8.

    From v0.19.1 on totals are cut to what the table has. Before, a bucket is added, whose batch is at most max_num_seqs from
    v0.14.1 on: 5, which only happens to be none of the table's; without that bound it is 8, as it should be.
    """
    rules = VERSIONS[version]
    assert isinstance(rules, GaudiVersion)
    table = [*((size, 1, blocks) for size in (1, 4) for blocks in (4, 8)), (8, 1, 8)]

    assert (
        list(cold_decodes(table, rules.lookup, inputs_of(max_num_seqs=5, num_blocks=8, contiguous_pa=True)))
        == cold
    )
