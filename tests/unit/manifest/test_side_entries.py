"""Sampler and defragmenter entries are upstream's, in its order; and every mix of settings has an entry."""

from __future__ import annotations

import pytest

from aotgaudi.entries import DefragEntry, SamplerEntry
from aotgaudi.manifest.side_entries import defrag_entries, sampler_entries
from aotgaudi.spec.defrag import DefragSpec
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.sampler import SamplerSetting, SamplerSpec

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


def limits(num_blocks: int) -> ServingLimits:
    return ServingLimits(
        max_num_seqs=1, max_num_batched_tokens=16, max_model_len=16, block_size=16, num_blocks=num_blocks
    )


def test_every_threshold_is_a_defrag_entry() -> None:
    sizes = (8, 16, 32, 64, 128, 256, 512)

    assert defrag_entries(limits(2), DefragSpec()) == tuple(map(DefragEntry, sizes))
    assert defrag_entries(limits(2), DefragSpec(padded_swaps=(3,))) == (DefragEntry(3),)


@pytest.mark.parametrize(
    ("num_blocks", "defrag"), [(1, DefragSpec()), (9, DefragSpec(enabled=False))], ids=["one block", "off"]
)
def test_there_are_no_defrag_entries_where_nothing_is_exchanged(num_blocks: int, defrag: DefragSpec) -> None:
    assert defrag_entries(limits(num_blocks), defrag) == ()
