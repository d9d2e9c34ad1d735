from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotgaudi.bucketing.mhc_splits import StepSplits
from aotgaudi.entries import DecodeEntry, DefragEntry, Entry, MhcEntry, PromptEntry, SamplerEntry
from aotgaudi.manifest.coverage import ServerCoverage, coverage_of, coverage_of_server, left_out
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.scheduler import SchedulerSpec
from tests.specs import spec_of


def manifest_of(limits: dict[str, int] | None = None, **tables: Any) -> Manifest:
    return Manifest.of(spec_of(config={"max_position_embeddings": 100_000}, limits=limits, **tables))


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
    assert uncovered(without(manifest, *(e for e in others if e.batch_size == 2))) == {"sampler": 10}
    assert uncovered(without(manifest, *(e for e in others if e.batch_size == 1))) == {"sampler": 5}
    assert uncovered(without(manifest, *greedy, *others)) == {"sampler": 12}


def test_as_many_rows_as_are_decoded_need_a_sampler() -> None:
    manifest = manifest_of()
    of_two = [e for e in manifest.entries if isinstance(e, SamplerEntry) and e.batch_size == 2]

    coverage = coverage_of(without(manifest, *of_two))

    assert uncovered(without(manifest, *of_two)) == {"sampler": 6}
    assert str(coverage.smallest) == "sampling 2 rows by filtered"


def test_the_padded_sizes_that_exchanges_can_take_need_an_entry() -> None:
    manifest = manifest_of(defrag={"enabled": True, "padded_swaps": [4, 8, 16, 32], "threshold": 1})

    assert DefragEntry(32) not in manifest.entries  # 24 blocks: at most 12 exchanges.
    assert uncovered(without(manifest, DefragEntry(16))) == {"defrag": 4}
    assert uncovered(without(manifest, DefragEntry(4), DefragEntry(16))) == {"defrag": 8}
    assert str(coverage_of(without(manifest, DefragEntry(8))).smallest) == "exchanging 5 pairs of blocks"
    assert uncovered(manifest_of(defrag={"enabled": False})) == {}


V4 = {"model_type": "deepseek_v4", "hidden_size": 512, "max_position_embeddings": 100_000}


def v4_manifest(limits: dict[str, int] | None = None, **mhc: Any) -> Manifest:
    model = {"name": "m", "dtype": "float32", "config": V4}
    num_sms = mhc.pop("num_sms", 8)
    return Manifest.of(spec_of(model=model, limits=limits, mhc=mhc, target={"num_sms": num_sms}))


def test_a_token_count_is_covered_if_its_class_has_both_sublayers() -> None:
    limits = {"max_num_batched_tokens": 512, "max_model_len": 512, "num_blocks": 64}
    manifest = v4_manifest(limits, rule="sglang-pr25810")
    by_class = {entry.n_splits: entry for entry in manifest.entries if isinstance(entry, MhcEntry)}

    phases = {phase.kind: phase for phase in coverage_of(manifest).phases}
    coverage = coverage_of(without(manifest, by_class[4]))

    assert (phases["mhc"].num_reachable, phases["mhc"].num_uncovered) == (by_class[1].num_tokens, 0)
    assert uncovered(without(manifest, by_class[4])) == {"mhc": 64}
    assert str(coverage).startswith("no entry for 64 of 512 mhc token counts; the smallest:")
    assert str(coverage.smallest) == "hyper-connections of 65 tokens in 4 parts"
    assert coverage.unproved == ()


@settings(deadline=None, max_examples=40)
@given(
    any_limits(),
    st.sampled_from(["sglang-pr25810", "sglang-fma", "vllm-collapsed", "one"]),
    st.integers(1, 200),
)
def test_the_default_covers_every_token_count_under_every_rule(
    limits: dict[str, int], rule: str, num_sms: int
) -> None:
    manifest = v4_manifest(limits, rule=rule, num_sms=num_sms)
    splits = StepSplits.of(manifest.spec)
    warm = {entry.n_splits for entry in manifest.entries if isinstance(entry, MhcEntry)}

    assert coverage_of(manifest).is_closed
    assert splits is not None
    for entry in manifest.entries:
        if isinstance(entry, (PromptEntry, DecodeEntry)):
            assert splits.of_entry(entry) in warm


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


FIRST_SERVER = {
    "max_num_seqs": 4,
    "max_num_prefill_seqs": 4,
    "max_num_batched_tokens": 8192,
    "max_model_len": 4096,
    "block_size": 128,
    "num_blocks": 5746,
}
"""Of the tables in vLLM-Gaudi's README: neither prefix caching nor chunked prefill."""

WHOLE_PROMPTS = {
    "scheduler": {"engine": "vllm", "chunked_prefill": False},
    "bucketing": {"version": "vllm-hpu-extension@ad55828", "prefix_caching": False, "contiguous_pa": True},
}

CHUNKS = {
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
    "max_model_len": 8192,
    "block_size": 128,
    "num_blocks": 4105,
}
"""Of the example in docs/how-to/from-vllm.md, without contiguous paged attention."""


def server_coverage(manifest: Manifest) -> ServerCoverage:
    found = coverage_of_server(manifest.spec)
    assert found is not None
    return found


def test_a_server_of_whole_prompts_gets_no_entry_that_it_cannot_form_and_is_told_of_no_hole() -> None:
    manifest = manifest_of(FIRST_SERVER, **WHOLE_PROMPTS)

    coverage = coverage_of(manifest)

    assert coverage.is_closed
    assert (coverage.phases[0].num_reachable, coverage.phases[0].num_uncovered) == (32, 0)
    assert len(manifest.of_kind("prompt")) == 36  # The README's own number.
    assert all(entry.row()[2] == 0 for entry in manifest.of_kind("prompt"))
    assert server_coverage(manifest).coverage.is_closed
    assert left_out(manifest.spec) == ("steps of several prompts, up to 4",)


def test_graphs_that_follow_from_more_than_a_bucket_are_named_under_torch_compile() -> None:
    target = {"backend": "hpu", "execution_mode": "torch_compile"}

    def named(**tables: Any) -> tuple[str, ...]:
        return left_out(manifest_of({**CHUNKS, "max_num_batched_tokens": 8192}, **tables).spec)

    compiled = named(scheduler={"engine": "vllm"}, target=target)
    whole = named(scheduler=WHOLE_PROMPTS["scheduler"], target=target)
    lazy = named(scheduler={"engine": "vllm"}, target={**target, "execution_mode": "lazy"})

    dynamic, mixed, no_rows = (text for text in compiled if text not in lazy)
    assert "VLLM_T_COMPILE_DYNAMIC_SHAPES=false" in dynamic
    assert "mix greedy and random requests" in mixed
    assert no_rows.startswith("logits of no rows")
    assert dynamic in whole
    assert no_rows not in whole


def test_cached_blocks_come_before_whole_prompts_where_there_is_prefix_caching() -> None:
    bucketing = {**WHOLE_PROMPTS["bucketing"], "prefix_caching": True}
    manifest = manifest_of(FIRST_SERVER, **{**WHOLE_PROMPTS, "bucketing": bucketing})

    prompt, *_ = coverage_of(manifest).phases

    assert (prompt.num_reachable, prompt.num_uncovered) == (32 * 33 // 2, 0)


def test_the_closed_manifest_of_a_server_and_the_holes_of_the_table_that_it_keeps() -> None:
    manifest = manifest_of(CHUNKS, scheduler={"engine": "vllm"})

    own = server_coverage(manifest)

    assert coverage_of(manifest).is_closed
    assert [str(phase) for phase in own.coverage.phases] == [
        "26 of 920 prompt cells",
        "0 of 387,712 decode steps",
    ]
    assert str(own.coverage.smallest) == (
        "a prompt chunk of 897 tokens after 6,913 tokens (55 blocks), 7,810 in all"
    )
    assert own.fallback == (1, 960, 64)
    assert sum(1 for _ in own.holes) > 0


def test_steps_of_several_tokens_a_sequence_are_counted_and_closed() -> None:
    bucketing = {"num_speculative_tokens": 2}
    manifest = manifest_of(CHUNKS, scheduler={"engine": "vllm"}, bucketing=bucketing)
    public = manifest_of(
        CHUNKS, scheduler={"engine": "vllm"}, bucketing={**bucketing, "coverage": "upstream"}
    )

    own = server_coverage(manifest)

    assert [str(phase) for phase in coverage_of(manifest).phases[:3]] == [
        "0 of 920 prompt cells",
        "0 of 387,712 decode steps",
        "0 of 775,424 speculative steps",
    ]
    assert str(own.coverage.phases[2]) == "384,428 of 775,424 speculative steps"
    assert own.fallback == (16, 1, 128)
    assert coverage_of(public).phases[:3] == own.coverage.phases
    assert "the graphs of the draft model, and of accepting its tokens" in left_out(manifest.spec)


def test_speculative_steps_of_the_extension_are_left_out_by_name() -> None:
    bucketing = {**WHOLE_PROMPTS["bucketing"], "num_speculative_tokens": 2}
    manifest = manifest_of(FIRST_SERVER, **{**WHOLE_PROMPTS, "bucketing": bucketing})

    assert "speculative" not in {phase.kind for phase in coverage_of(manifest).phases}
    assert (
        "decodes of several tokens a sequence, whose shapes in vllm-hpu-extension@ad55828 are not known"
        in left_out(manifest.spec)
    )


def test_the_oldest_version_with_such_steps_has_neither_seeds_nor_buckets_for_them() -> None:
    """From v0.11.2 the runner flattens them; its table has batches times 1 only, and a batch of 128 makes 256 rows."""
    bucketing = {"version": "vllm-gaudi@v0.11.2", "num_speculative_tokens": 1}
    manifest = manifest_of(CHUNKS, scheduler={"engine": "vllm"}, bucketing=bucketing)

    assert coverage_of(manifest).is_closed
    assert server_coverage(manifest).coverage.phases[2].num_uncovered > 0
    assert max(entry.row()[0] for entry in manifest.of_kind("decode")) == 256  # type: ignore[type-var]


def test_of_unified_steps_nothing_is_claimed_and_no_other_steps_are_counted() -> None:
    bucketing = {"strategy": "unified", "version": "vllm-gaudi@v0.14.1", "contiguous_pa": True}
    manifest = manifest_of(scheduler={"engine": "vllm"}, bucketing=bucketing)

    coverage = coverage_of(manifest)

    assert not coverage.is_closed
    assert coverage.phases == ()
    assert str(coverage) == "nothing is proved of unified steps, which are all that this server forms"
    assert coverage_of_server(manifest.spec) is None


def test_our_own_engine_asks_about_its_own_steps_whatever_the_spec_describes() -> None:
    manifest = manifest_of(FIRST_SERVER, **WHOLE_PROMPTS)

    assert coverage_of(manifest, SchedulerSpec()).phases[0].num_uncovered == 528
    assert coverage_of_server(manifest_of().spec) is None
    assert left_out(manifest_of().spec) == ()


@pytest.mark.parametrize(
    ("limits", "bucketing", "num_cold"),
    [
        ((512, 4, 4, 512, 33), {}, 15),
        ((700, 6, 4, 384, 9), {"prefix_caching": True}, 4),
        ((512, 4, 4, 256, 33), {"merged_prefill": True}, 3),
        ((2048, 2, 2, 512, 80), {"merged_prefill": True}, 4),
    ],
)
def test_steps_of_several_prompts_leave_as_many_buckets_cold_as_in_the_plugin_itself(
    limits: tuple[int, ...], bucketing: dict[str, Any], num_cold: int
) -> None:
    """Counted with vllm-gaudi 0.26.0 on the double (tests/guests_real/test_vllm_gaudi.py)."""
    names = ("max_model_len", "max_num_seqs", "max_num_prefill_seqs", "max_num_batched_tokens", "num_blocks")
    tables = {"bucketing": {"version": "vllm-gaudi@v0.26.0", **bucketing}, "scheduler": {"engine": "vllm"}}
    manifest = manifest_of({**dict(zip(names, limits, strict=True)), "block_size": 128}, **tables)

    assert len(server_coverage(manifest).cold) == num_cold


def test_buckets_that_the_server_s_warm_up_leaves_out_are_named() -> None:
    limits = {
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "max_model_len": 4096,
        "block_size": 128,
        "num_blocks": 5746,
    }
    newest = coverage_of_server(manifest_of(limits, scheduler={"engine": "vllm"}).spec)
    older = manifest_of(
        limits, scheduler={"engine": "vllm"}, bucketing={"version": "vllm-gaudi@v0.17.1"}
    ).spec

    assert newest is not None
    assert len(newest.cold) == 8
    assert all(query + 128 * blocks > 4096 for _, query, blocks in newest.cold)
    found = coverage_of_server(older)
    assert found is not None
    assert found.cold == ()
