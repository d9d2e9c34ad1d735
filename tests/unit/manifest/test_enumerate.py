from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.proof import ReachableSteps, uncovered
from aotgaudi.bucketing.strategy import BucketingInputs
from aotgaudi.bucketing.versions import VERSIONS, find_strategy, find_unified
from aotgaudi.entries import DefragEntry, PromptEntry, SamplerEntry
from aotgaudi.errors import SpecError
from aotgaudi.manifest.enumerate import enumerate_entries
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from tests import specs


def spec_of(limits: dict[str, int] | None = None, **tables: Any) -> BuildSpec:
    return specs.spec_of(config={"max_position_embeddings": 100_000}, limits=limits, **tables)


def test_prompt_entries_of_the_tiny_model_are_the_public_ones_and_what_closes_them() -> None:
    public = Manifest.of(spec_of(bucketing={"coverage": "upstream"})).of_kind("prompt")

    assert public == tuple(PromptEntry(1, query, ctx) for query in (16, 32) for ctx in (0, 1, 2, 4, 7))
    assert Manifest.of(spec_of()).of_kind("prompt") == tuple(sorted([*public, PromptEntry(1, 16, 8)]))


def test_short_queries_are_added_after_each_context_of_the_closed_table() -> None:
    plain = Manifest.of(spec_of())
    manifest = Manifest.of(spec_of(bucketing={"short_queries": [4, 16]}))

    added = [entry for entry in manifest.entries if entry not in plain.entries]
    assert added == [PromptEntry(1, 4, ctx) for ctx in (0, 1, 2, 4, 7, 8)]
    assert [entry for entry in manifest.entries if entry not in added] == list(plain.entries)
    assert manifest.of_kind("prompt") == tuple(sorted(manifest.of_kind("prompt")))


@pytest.mark.parametrize(
    ("bucketing", "scheduler", "message"),
    [
        ({"short_queries": [8, 4]}, {}, "ascending"),
        ({"short_queries": [4, 4]}, {}, "ascending"),
        ({"short_queries": [0]}, {}, "short_queries"),
        ({"short_queries": [4, 64]}, {}, "max_num_batched_tokens 32"),
        ({"short_queries": [4]}, {"engine": "vllm"}, "engine 'vllm'"),
    ],
)
def test_short_queries_that_no_step_has_are_refused(
    bucketing: dict[str, Any], scheduler: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        spec_of(bucketing=bucketing, scheduler=scheduler)


def test_the_policy_and_the_cache_change_no_entry() -> None:
    entries = Manifest.of(spec_of()).entries

    assert Manifest.of(spec_of(scheduler={"policy": "throughput"})).entries == entries
    assert Manifest.of(spec_of(bucketing={"prefix_caching": False})).entries == entries


def test_sampler_entries_are_all_settings_after_a_change_then_without_for_each_decode_batch_size() -> None:
    settings = [{"temperature": 0, "top_p": 1, "top_k": 0}, {"temperature": 0.5, "top_p": 0.9, "top_k": 7}]
    manifest = Manifest.of(spec_of(sampler={"settings": settings}))

    assert manifest.of_kind("sampler") == tuple(
        SamplerEntry(batch_size, *row, changed)
        for batch_size in (1, 2)
        for changed in (True, False)
        for row in ((0.0, 1.0, 0), (0.5, 0.9, 7))
    )


def test_defrag_entries_follow_the_spec_unless_there_is_nothing_to_exchange() -> None:
    one_block = {"max_model_len": 16, "num_blocks": 1}

    assert Manifest.of(spec_of(defrag={"padded_swaps": [4, 9, 13], "threshold": 14})).of_kind("defrag") == (
        DefragEntry(4),
        DefragEntry(9),
    )
    assert Manifest.of(spec_of(defrag={"enabled": False})).of_kind("defrag") == ()
    assert Manifest.of(spec_of(one_block)).of_kind("defrag") == ()


@st.composite
def short_limits(draw: st.DrawFn) -> dict[str, int]:
    block_size = draw(st.sampled_from([16, 128]))
    max_model_len = draw(st.integers(block_size, 8191))
    fewest = -(-max_model_len // block_size)
    return {
        "max_num_seqs": draw(st.integers(1, 32)),
        "max_num_batched_tokens": draw(st.integers(block_size, max_model_len)),
        "max_model_len": max_model_len,
        "block_size": block_size,
        "num_blocks": draw(st.integers(fewest, 4 * fewest)),
    }


@given(short_limits())
def test_entries_are_deterministic_and_their_ids_distinct(limits: dict[str, int]) -> None:
    entries = enumerate_entries(spec_of(limits))

    assert entries == enumerate_entries(spec_of(limits))
    assert len({entry.id for entry in entries}) == len(entries)


def test_entries_of_the_tiny_model_leave_no_step_uncovered() -> None:
    spec = spec_of()

    assert (
        list(uncovered(ReachableSteps.of(spec.limits), BucketTable.from_entries(enumerate_entries(spec))))
        == []
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_entries_are_the_distinct_buckets_of_the_public_table_ascending(version: str) -> None:
    """Of every strategy; some of upstream's lists hold buckets twice."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 128, "num_blocks": 64}
    for strategy in VERSIONS[version].strategy_names:
        if strategy == "file":
            continue
        spec = spec_of(limits, bucketing={"coverage": "upstream", "version": version, "strategy": strategy})
        inputs = BucketingInputs.from_spec(spec.limits, spec.bucketing)
        manifest = Manifest.of(spec)
        kinds = {
            kind: [entry.row() for entry in manifest.of_kind(kind)]
            for kind in ("prompt", "decode", "unified")
        }
        if strategy == "unified":
            table = find_unified(version).unified_table(inputs)
            assert kinds == {"prompt": [], "decode": [], "unified": sorted(set(table))}
        else:
            tables = find_strategy(version, strategy)
            assert kinds["prompt"] == sorted(set(tables.prompt_table(inputs)))
            assert kinds["decode"] == sorted(set(tables.decode_table(inputs)))
            assert kinds["unified"] == []


def test_a_bucket_file_gives_its_buckets() -> None:
    text = "(1, 32, 0)\n(1, 16, 7)\n(2, 1, 8)\n"
    bucketing = {"strategy": "file", "file_text": text, "coverage": "upstream"}

    manifest = Manifest.of(spec_of(bucketing=bucketing))

    assert manifest.of_kind("prompt") == (PromptEntry(1, 16, 7), PromptEntry(1, 32, 0))
    assert [entry.batch_size for entry in manifest.of_kind("sampler")][::14] == [1, 2]


def test_a_target_without_graphs_has_nothing_to_warm() -> None:
    target = {"backend": "hpu", "execution_mode": "eager"}

    assert enumerate_entries(spec_of(target=target)) == ()
    assert enumerate_entries(spec_of(target={**target, "execution_mode": "torch_compile"})) != ()


def test_more_sampler_entries_than_anyone_has_are_refused_before_they_are_made() -> None:
    settings = [{"temperature": 0.5, "top_p": 1, "top_k": k} for k in range(2000)]
    limits = {"max_num_seqs": 20_000, "num_blocks": 20_000}
    bucketing = {"strategy": "linear", "decode": {"batch_size": {"step": 32}, "num_blocks": {"step": 20_000}}}

    with pytest.raises(
        SpecError, match=r"^sampler\.settings: gives 2,\d{3},000 sampler entries: 2 for each of 2,000"
    ):
        enumerate_entries(spec_of(limits, bucketing=bucketing, sampler={"settings": settings}))


@pytest.mark.parametrize(
    ("limits", "bucketing"),
    [
        ({"max_num_seqs": 2**31 - 1, "num_blocks": 2**31 - 1}, {"strategy": "linear"}),
        ({"max_num_seqs": 2**31 - 1, "num_blocks": 2**31 - 1}, {"strategy": "padding_aware"}),
        (
            {"num_blocks": 2**31 - 1, "max_num_batched_tokens": 2**31 - 1},
            {"decode": {"num_blocks": {"step": 1}}, "strategy": "linear"},
        ),
        (
            {"max_num_prefill_seqs": 2**20, "max_num_seqs": 2**20, "max_num_batched_tokens": 2**31 - 1},
            {"strategy": "linear"},
        ),
    ],
)
def test_what_would_take_for_ever_is_refused_at_once(
    limits: dict[str, int], bucketing: dict[str, Any]
) -> None:
    started = time.perf_counter()

    with pytest.raises(SpecError, match="gives"):
        enumerate_entries(spec_of(limits, bucketing=bucketing))

    assert time.perf_counter() - started < 5


def test_a_bucket_that_no_tensor_can_have_is_refused() -> None:
    """Speculative decoding multiplies the blocks of the largest decode."""
    limits = {"max_model_len": 100_000, "num_blocks": 2**31 - 1, "max_num_seqs": 2**20}
    bucketing = {"num_speculative_tokens": 1024, "contiguous_pa": True}

    with pytest.raises(
        SpecError, match=r"^bucketing: gives a decode entry with num_blocks [\d,]+ \(1 to 2,147,483,647"
    ):
        enumerate_entries(spec_of(limits, bucketing=bucketing))
