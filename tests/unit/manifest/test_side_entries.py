"""Sampler and defragmenter entries are upstream's, in its order; and every mix of settings has an entry."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.engine.blocks import BlockPool
from aotgaudi.engine.defragmenter import plan_step
from aotgaudi.entries import SamplerEntry
from aotgaudi.manifest.enumerate import defrag_entries, most_exchanges, sampler_entries
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.sampler import SamplerSetting, SamplerSpec
from tests import specs

UPSTREAM = ((0.0, 1.0, 0), (1.0, 1.0, 0), (0.7, 0.9, 50), (0.3, 0.95, 20), (1.2, 0.8, 100), (0.8, 0.85, 0))


def setting(temperature: float, top_p: float = 1.0, top_k: int = 0, **others: float) -> SamplerSetting:
    return SamplerSetting(temperature=temperature, top_p=top_p, top_k=top_k, **others)


@pytest.mark.parametrize(("smallest", "sizes"), [(1, (1, 138)), (0, (0, 1, 138))])
def test_the_default_entries_are_upstreams_twelve_for_each_batch_size(
    smallest: int, sizes: tuple[int, ...]
) -> None:
    entries = sampler_entries([138, 138, 1, 138], SamplerSpec(smallest_batch_size=smallest))

    assert entries == tuple(
        SamplerEntry(size, *values, changed)
        for size in sizes
        for changed in (True, False)
        for values in UPSTREAM
    )


def test_batch_sizes_are_in_the_order_of_the_decode_table_after_1() -> None:
    sizes = [entry.batch_size for entry in sampler_entries([4, 1, 2, 4], SamplerSpec())]

    assert list(dict.fromkeys(sizes)) == [1, 4, 2]


def test_a_table_without_decode_steps_leaves_batch_size_1() -> None:
    assert {entry.batch_size for entry in sampler_entries([], SamplerSpec())} == {1}


def test_the_columns_of_a_setting_are_those_of_its_entries() -> None:
    asked = setting(
        0.5, 0.9, 7, min_p=0.1, presence_penalty=-1, frequency_penalty=0.25, repetition_penalty=1.1
    )

    entries = sampler_entries([], SamplerSpec(settings=(asked,)))

    row = (0.1, -1.0, 0.25, 1.1, 0)
    assert [entry.row() for entry in entries] == [
        (1, 0.5, 0.9, 7, changed, *row) for changed in (True, False)
    ]


def test_a_mix_that_no_setting_has_is_added_after_the_settings() -> None:
    spec = SamplerSpec(
        settings=(setting(0.7, 0.9), setting(0, frequency_penalty=0.5), setting(0, num_logprobs=4))
    )

    entries = sampler_entries([], spec)

    signatures = [str(entry.signature) for entry in entries if entry.batch_changed]
    assert signatures == [
        "filtered",
        "greedy+penalties",
        "greedy+logprobs",
        "greedy+penalties+logprobs",
        "filtered+logprobs",
        "filtered+penalties",
        "filtered+penalties+logprobs",
    ]
    assert {entry.num_logprobs for entry in entries} == {0, 4}
    assert len(set(entries)) == len(entries)


def test_log_probabilities_have_one_width() -> None:
    spec = SamplerSpec(
        settings=(setting(0, num_logprobs=2), setting(1, num_logprobs=5), setting(0, num_logprobs=5))
    )

    entries = sampler_entries([], spec)

    assert [(entry.temperature, entry.num_logprobs) for entry in entries] == [(0, 5), (1, 5)] * 2


def spec_of(num_blocks: int, engine: str = "aotgaudi", **defrag: Any) -> BuildSpec:
    return specs.spec_of(
        config={"max_position_embeddings": 16},
        limits={**specs.ONE_BLOCK, "num_blocks": num_blocks},
        scheduler={"engine": engine},
        defrag=defrag,
    )


def sizes_of(spec: BuildSpec) -> list[int]:
    return [entry.padded_swaps for entry in defrag_entries(spec)]


def test_every_size_that_vllm_warms_up_is_a_defrag_entry() -> None:
    assert sizes_of(spec_of(2, "vllm")) == [8, 16, 32, 64, 128, 256, 512]
    assert sizes_of(spec_of(2, "vllm", padded_swaps=[3])) == [3]


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        (spec_of(1024, threshold=1), [8, 16, 32, 64, 128, 256, 512]),
        (spec_of(24, threshold=1), [8, 16]),  # at most 12 pairs of a used and a free block
        (spec_of(16, threshold=1), [8]),
        (spec_of(40), [8]),  # acts while fewer than 8 blocks are used
        (spec_of(34), [8]),
        (spec_of(33), []),  # the highest block is never more than 32 above the number of blocks in use
    ],
)
def test_sizes_that_our_engine_never_needs_are_left_out(spec: BuildSpec, sizes: list[int]) -> None:
    assert sizes_of(spec) == sizes


@given(st.integers(1, 60), st.integers(1, 12), st.sets(st.integers(1, 40), min_size=1), st.data())
def test_every_defragmentation_that_our_engine_plans_has_an_entry(
    num_blocks: int, threshold: int, sizes: set[int], data: st.DataObject
) -> None:
    spec = spec_of(num_blocks, threshold=threshold, padded_swaps=sorted(sizes))
    used = data.draw(st.sets(st.integers(1, num_blocks)))
    pool = BlockPool(num_blocks)
    pool.allocate(num_blocks)
    pool.free(sorted(set(range(1, num_blocks + 1)) - used))

    step = plan_step(pool, spec.defrag)

    assert step is None or step.entry in defrag_entries(spec)
    assert step is None or len(step.moves) <= most_exchanges(spec)


@pytest.mark.parametrize("engine", ["aotgaudi", "vllm"])
def test_there_are_no_defrag_entries_where_nothing_is_exchanged(engine: str) -> None:
    assert sizes_of(spec_of(1, engine)) == []
    assert sizes_of(spec_of(99, engine, enabled=False)) == []
