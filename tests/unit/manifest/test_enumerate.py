from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.coverage import uncovered
from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.manifest.entries import DefragEntry, PromptEntry, SamplerEntry
from aotgaudi.manifest.enumerate import enumerate_entries
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import spec_from_json

LIMITS = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "max_model_len": 128,
    "block_size": 16,
    "num_blocks": 24,
}


def spec_of(limits: dict[str, int] = LIMITS, **tables: Any) -> BuildSpec:
    config = {"model_type": "llama", "max_position_embeddings": 100_000}
    model = {"name": "tiny", "dtype": "float32", "config": config}
    return spec_from_json({"schema": "aotgaudi.spec/1", "model": model, "limits": limits, **tables})


def test_prompt_entries_of_the_tiny_model() -> None:
    prompt = Manifest.of(spec_of()).of_kind("prompt")

    assert prompt == tuple(PromptEntry(1, query, ctx) for query in (16, 32) for ctx in (0, 1, 2, 4, 7))


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
    one_block = {**LIMITS, "max_model_len": 16, "num_blocks": 1}

    assert Manifest.of(spec_of(defrag={"padded_swaps": [4, 9]})).of_kind("defrag") == (
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

    assert list(uncovered(spec.limits, BucketTable.from_entries(enumerate_entries(spec)))) == []
