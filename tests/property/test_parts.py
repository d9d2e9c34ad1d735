"""Parts of manifests: closed under their limits, none of which could be larger alone; the scheduler finds every entry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.entries import Entry, SamplerEntry
from aotgaudi.manifest.coverage import coverage_of
from aotgaudi.manifest.importance import Importance, TierName, Traffic
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.subset import Chunks, Subset, largest_subset, subset_under
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.scheduler import SchedulerSpec
from tests.driving import asked_tokens, served
from tests.specs import spec_of

GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
RANDOM = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
PENALTY = {**GREEDY, "presence_penalty": 0.5}
COORDINATES = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "num_blocks")
chunks_kinds: st.SearchStrategy[Chunks] = st.sampled_from(get_args(Chunks))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Small ones, of any limits, closed and with the holes of the public tables."""
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    max_model_len = draw(st.integers(max(2, block_size), 12 * block_size))
    fewest = -(-max_model_len // block_size)
    limits = {
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": draw(st.integers(max(2, block_size), 2 * max_model_len)),
        "max_model_len": max_model_len,
        "block_size": block_size,
        "num_blocks": draw(st.integers(fewest, 4 * fewest)),
    }
    bucketing: dict[str, Any] = {
        "contiguous_pa": draw(st.booleans()),
        "coverage": draw(st.sampled_from(["closed", "closed", "upstream"])),
    }
    samplers = draw(st.lists(st.sampled_from([GREEDY, RANDOM, PENALTY]), min_size=1, unique_by=str))
    return Manifest.of(
        spec_of(
            limits=limits,
            bucketing=bucketing,
            sampler={"settings": samplers},
            defrag={"enabled": True, "threshold": 1, "padded_swaps": [1, 2, 8]},
        )
    )


@st.composite
def subsets(draw: st.DrawFn, manifest: Manifest) -> tuple[Entry, ...]:
    """Any entries of a manifest; mostly with all samplers, without which there is seldom a part."""
    keeps_samplers = draw(st.integers(0, 3)) > 0
    kept = draw(st.lists(st.booleans(), min_size=len(manifest.entries), max_size=len(manifest.entries)))
    return tuple(
        entry
        for entry, is_kept in zip(manifest.entries, kept, strict=True)
        if is_kept or (keeps_samplers and isinstance(entry, SamplerEntry))
    )


def is_closed_under(part: Subset, limits: ServingLimits) -> bool:
    """By the proof, not by what `largest_subset` says of it."""
    spec = part.whole.spec.model_copy(update={"limits": limits, "sampler": part.manifest.spec.sampler})
    entries = tuple(entry for entry in part.manifest.entries if entry.kind != "defrag")
    spec = spec.model_copy(update={"defrag": spec.defrag.model_copy(update={"enabled": False})})
    return coverage_of(Manifest(spec, entries), SchedulerSpec()).is_closed


def raised(part: Subset, coordinate: str) -> ServingLimits | None:
    """The limits with one more of one, where the whole has more."""
    value = getattr(part.limits, coordinate) + 1
    if value > getattr(part.whole.spec.limits, coordinate):
        return None
    return part.limits.model_copy(update={coordinate: value})


@given(manifests(), chunks_kinds, st.data())
def test_a_part_is_closed_under_its_limits_and_no_limit_could_be_larger_alone(
    manifest: Manifest, chunks: Chunks, data: st.DataObject
) -> None:
    warm = data.draw(subsets(manifest))

    part = largest_subset(manifest, warm, chunks)

    if part is None:
        return
    assert part.coverage.is_closed
    assert is_closed_under(part, part.limits)
    assert set(part.manifest.entries) <= set(warm)
    assert all(getattr(part.limits, name) <= getattr(manifest.spec.limits, name) for name in COORDINATES)
    assert part.limits.max_blocks_per_seq <= part.limits.num_blocks
    if chunks == "whole":
        assert part.limits.max_num_batched_tokens == manifest.spec.limits.max_num_batched_tokens
    for name in COORDINATES:
        larger = raised(part, name)
        if larger is None:
            continue
        has_room = larger.max_blocks_per_seq <= larger.num_blocks
        assert not (has_room and is_closed_under(part, larger)), name


@given(manifests(), chunks_kinds, st.data())
def test_where_there_is_no_part_the_least_limits_have_holes(
    manifest: Manifest, chunks: Chunks, data: st.DataObject
) -> None:
    warm = data.draw(subsets(manifest))
    if largest_subset(manifest, warm, chunks) is not None:
        return
    limits = manifest.spec.limits
    least = limits.model_copy(
        update={
            "max_model_len": 2,
            "max_num_seqs": 1,
            "max_num_batched_tokens": limits.block_size if chunks == "cut" else limits.max_num_batched_tokens,
            "num_blocks": -(-2 // limits.block_size),
        }
    )

    for setting in manifest.spec.sampler.settings:
        assert not subset_under(manifest, warm, least, [setting]).coverage.is_closed


@given(manifests(), chunks_kinds)
def test_all_entries_of_a_closed_manifest_are_a_part_with_its_own_limits(
    manifest: Manifest, chunks: Chunks
) -> None:
    part = largest_subset(manifest, manifest.entries, chunks)

    if manifest.spec.bucketing.coverage == "closed":
        assert part is not None
        assert part.has_whole_limits
        assert part.manifest.entries == manifest.entries


@given(manifests(), chunks_kinds, st.randoms(use_true_random=False))
def test_along_any_order_a_part_that_is_there_stays_and_its_longest_request_never_gets_shorter(
    manifest: Manifest, chunks: Chunks, random: Any
) -> None:
    order = list(manifest.entries)
    random.shuffle(order)

    parts = [largest_subset(manifest, order[:num], chunks) for num in range(len(order) + 1)]
    lens = [0 if part is None else part.limits.max_model_len for part in parts]

    assert len(lens) == len(order) + 1
    assert lens == sorted(lens)


@given(manifests(), chunks_kinds, st.data(), asked_tokens)
def test_within_the_limits_the_scheduler_never_meets_a_step_without_a_warm_entry(
    manifest: Manifest, chunks: Chunks, data: st.DataObject, asked: list[tuple[int, int | None]]
) -> None:
    part = largest_subset(manifest, data.draw(subsets(manifest)), chunks)
    if part is None:
        return
    table = BucketTable.from_entries(part.manifest.entries)
    policy = data.draw(st.sampled_from(["latency", "throughput"]))

    for step in served(part.limits, table, asked, policy, data.draw(st.booleans())):
        assert step.entry in part.manifest.entries


# Importance


@st.composite
def traffics(draw: st.DrawFn, manifest: Manifest) -> Traffic:
    steps = [*manifest.of_kind("prompt"), *manifest.of_kind("decode")]
    counts = draw(st.dictionaries(st.sampled_from(steps), st.floats(0.1, 100), max_size=8))
    length = draw(st.integers(2, manifest.spec.limits.max_model_len))
    limits = manifest.spec.limits.model_copy(update={"max_model_len": length})
    return Traffic(counts, draw(st.sampled_from([None, limits])))


@settings(max_examples=60)
@given(manifests(), st.data())
def test_the_order_has_every_entry_once_and_its_tiers_can_be_served(
    manifest: Manifest, data: st.DataObject
) -> None:
    importance = Importance(manifest, data.draw(traffics(manifest)))

    assert sorted(map(str, importance.order)) == sorted(map(str, manifest.entries))
    if manifest.spec.bucketing.coverage == "upstream":
        return
    for name in get_args(TierName):
        tier = importance.tier(name)
        part = largest_subset(manifest, tier, "whole")
        assert tier == importance.order[: len(tier)]
        assert part is not None
        assert part.settings == tuple(range(len(manifest.spec.sampler.settings)))
        if name == "covering":
            assert part.has_whole_limits
            last = largest_subset(manifest, tier[:-1], "whole")
            assert last is None or not last.has_whole_limits or tier == importance.tier("least")


@given(manifests(), st.data())
def test_a_tier_covers_the_limits_that_traffic_asks_for_before_what_is_seldom_used(
    manifest: Manifest, data: st.DataObject
) -> None:
    traffic = data.draw(traffics(manifest))
    if traffic.limits is None or manifest.spec.bucketing.coverage == "upstream":
        return
    importance = Importance(manifest, traffic)

    part = largest_subset(manifest, importance.tier("hot"), "whole") if traffic.steps else None

    if part is not None:
        assert part.limits.max_model_len >= traffic.limits.max_model_len


@pytest.mark.parametrize("num_entries", [0, 1, 30])
def test_no_beginning_is_shorter_than_what_can_be_served(num_entries: int) -> None:
    manifest = Manifest.of(spec_of())
    importance = Importance(manifest)

    beginning = importance.first(num_entries)

    assert len(beginning) == max(num_entries, len(importance.tier("least")))
    assert largest_subset(manifest, beginning, "whole") is not None


def kinds(entries: Sequence[Entry]) -> list[str]:
    return [entry.kind for entry in entries]


def test_the_order_of_a_small_manifest() -> None:
    order = Importance(Manifest.of(spec_of(sampler={"settings": [GREEDY]}))).order

    assert list(map(str, order[:9])) == [
        "(prompt, 1, 32, 2)",
        "(decode, 1, 1, 2)",
        "(sampler, 1, 0.0, 1.0, 0, True)",
        "(sampler, 1, 0.0, 1.0, 0, False)",
        "(prompt, 1, 32, 7)",
        "(prompt, 1, 16, 8)",
        "(decode, 1, 1, 8)",
        "(decode, 2, 1, 16)",
        "(sampler, 2, 0.0, 1.0, 0, True)",
    ]
