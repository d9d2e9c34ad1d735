from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from aotgaudi.entries import DefragEntry, Entry, PromptEntry, SamplerEntry
from aotgaudi.manifest.coverage import coverage_of
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.parse import spec_from_json

LIMITS = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "max_model_len": 128,
    "block_size": 16,
    "num_blocks": 24,
}


def manifest_of(limits: dict[str, int] = LIMITS, **tables: Any) -> Manifest:
    config = {"model_type": "llama", "max_position_embeddings": 100_000}
    model = {"name": "tiny", "dtype": "float32", "config": config}
    return Manifest.of(
        spec_from_json({"schema": "aotgaudi.spec/1", "model": model, "limits": limits, **tables})
    )


def without(manifest: Manifest, *removed: Entry) -> Manifest:
    assert set(removed) <= set(manifest.entries)
    return Manifest(manifest.spec, tuple(entry for entry in manifest.entries if entry not in removed))


def uncovered(manifest: Manifest) -> dict[str, int]:
    return {p.kind: p.num_uncovered for p in coverage_of(manifest).phases if p.num_uncovered}


@st.composite
def any_limits(draw: st.DrawFn) -> dict[str, int]:
    block_size = draw(st.sampled_from([1, 16, 128]))
    max_model_len = draw(st.integers(max(2, block_size), 20_000 if block_size > 1 else 300))
    fewest = -(-max_model_len // block_size)
    return {
        "max_num_seqs": draw(st.integers(1, 64)),
        "max_num_batched_tokens": draw(st.integers(max(2, block_size), 2 * max_model_len)),
        "max_model_len": max_model_len,
        "block_size": block_size,
        "num_blocks": draw(st.integers(fewest, 4 * fewest)),
    }


@settings(deadline=None)
@given(any_limits(), st.booleans(), st.sampled_from([1.0, 1.5, 2.0]))
def test_the_default_is_closed_for_every_limit(
    limits: dict[str, int], contiguous_pa: bool, max_padding: float
) -> None:
    manifest = manifest_of(limits, bucketing={"contiguous_pa": contiguous_pa, "max_padding": max_padding})

    assert coverage_of(manifest).is_closed
    assert list(manifest.of_kind("prompt")) == sorted(set(manifest.of_kind("prompt")))
    assert list(manifest.of_kind("decode")) == sorted(set(manifest.of_kind("decode")))


def test_upstream_keeps_the_public_table_and_closed_adds_to_it() -> None:
    public, closed = manifest_of(bucketing={"coverage": "upstream"}), manifest_of()

    assert set(closed.entries) - set(public.entries) == {PromptEntry(1, 16, 8)}
    assert set(public.entries) < set(closed.entries)
    assert str(coverage_of(public)) == (
        "no entry for 1 of 17 prompt cells; the smallest:"
        " a prompt chunk of 1 token after 113 tokens (8 blocks), 114 in all"
    )
    assert coverage_of(closed).is_closed


def test_every_sampler_batch_size_needs_all_signatures() -> None:
    manifest = manifest_of()
    greedy = [e for e in manifest.entries if isinstance(e, SamplerEntry) and e.temperature == 0]
    others = [e for e in manifest.entries if isinstance(e, SamplerEntry) and e.temperature > 0]

    assert uncovered(without(manifest, *greedy)) == {}  # What does more serves what needs less.
    assert uncovered(without(manifest, *(e for e in others if e.batch_size == 2))) == {"sampler": 4}
    assert uncovered(without(manifest, *(e for e in others if e.batch_size == 1))) == {"sampler": 2}
    assert uncovered(without(manifest, *greedy, *others)) == {"sampler": 6}


def test_as_many_rows_as_are_decoded_need_a_sampler() -> None:
    manifest = manifest_of()
    of_two = [e for e in manifest.entries if isinstance(e, SamplerEntry) and e.batch_size == 2]

    coverage = coverage_of(without(manifest, *of_two))

    assert uncovered(without(manifest, *of_two)) == {"sampler": 3}
    assert str(coverage.smallest) == "sampling 2 rows by filtered"


def test_the_padded_sizes_that_exchanges_can_take_need_an_entry() -> None:
    manifest = manifest_of(defrag={"padded_swaps": [4, 8, 16, 32]})

    assert uncovered(without(manifest, DefragEntry(32))) == {}  # 24 blocks: at most 12 exchanges.
    assert uncovered(without(manifest, DefragEntry(16))) == {"defrag": 4}
    assert uncovered(without(manifest, DefragEntry(4), DefragEntry(16))) == {"defrag": 8}
    assert str(coverage_of(without(manifest, DefragEntry(8))).smallest) == "exchanging 5 pairs of blocks"
    assert uncovered(manifest_of(defrag={"enabled": False})) == {}


def test_the_smallest_counterexample_is_the_smallest_of_all_kinds() -> None:
    manifest = manifest_of()
    samplers = [e for e in manifest.entries if isinstance(e, SamplerEntry)]

    coverage = coverage_of(without(manifest, *samplers, *manifest.of_kind("prompt")))

    assert str(coverage.smallest) == "a prompt chunk of 1 token"


def test_a_target_without_graphs_needs_nothing() -> None:
    manifest = manifest_of(target={"backend": "hpu", "execution_mode": "eager"})

    assert manifest.entries == ()
    assert coverage_of(manifest).is_closed
    assert coverage_of(manifest).phases == ()


def test_of_unified_tables_nothing_is_proved_and_they_cover_no_prompts_and_decodes() -> None:
    bucketing = {"strategy": "unified", "version": "vllm-gaudi@v0.14.1", "contiguous_pa": True}
    coverage = coverage_of(manifest_of(bucketing=bucketing))

    assert coverage.unproved == ("unified",)
    assert not coverage.is_closed
    assert [phase.num_reachable == phase.num_uncovered for phase in coverage.phases[:2]] == [True, True]
