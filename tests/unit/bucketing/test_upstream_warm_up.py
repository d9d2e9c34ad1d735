from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.strategy import Bucket, BucketingInputs
from aotgaudi.bucketing.upstream import UpstreamLookup, cold_decodes, cold_prompts
from aotgaudi.bucketing.versions import HISTORY, VERSIONS, GaudiVersion

GAUDI = [version for version in HISTORY if isinstance(version, GaudiVersion)]
NEWEST = GAUDI[0]
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
    lookup = UpstreamLookup(NEWEST.lookup, inputs, table, ())
    compiled = set()
    for size, query, blocks in reversed(table):
        is_too_long = query + blocks * inputs.block_size > inputs.max_model_len
        left = max(0, (inputs.max_model_len - query) // inputs.block_size)
        compiled.add(lookup.find_prompt(size, query, left if is_too_long else blocks).bucket)
    return compiled


@given(st.sets(st.tuples(st.just(1), st.integers(2, 32), st.integers(0, 8)), min_size=1))
def test_prompts_are_those_that_a_dummy_is_looked_up_to(table: set[Bucket]) -> None:
    ascending, inputs = sorted(table), inputs_of()

    assert set(cold_prompts(ascending, NEWEST.product, inputs)) == table - warmed_prompts(ascending, inputs)


def test_of_contexts_that_fill_the_model_only_the_smallest_is_compiled() -> None:
    table = [(1, 16, 2), (1, 16, 4), (1, 16, 5), (1, 16, 7), (2, 16, 9)]

    assert list(cold_prompts(table, NEWEST.product, inputs_of())) == [(1, 16, 5), (1, 16, 7)]
    assert isinstance(BEFORE, GaudiVersion)
    assert list(cold_prompts(table, BEFORE.product, inputs_of())) == []


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
