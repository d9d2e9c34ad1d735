"""A manifest's entries: steps, samplers, exchanges, hyper-connections and the vision tower."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.strategy import BucketingInputs
from aotgaudi.bucketing.versions import VERSIONS, find_strategy, find_unified
from aotgaudi.engine.blocks import BlockPool
from aotgaudi.engine.defragmenter import plan_step
from aotgaudi.entries import DecodeEntry, DefragEntry, Entry, MhcEntry, PromptEntry, SamplerEntry, VisionEntry
from aotgaudi.errors import SpecError
from aotgaudi.manifest.enumerate import (
    defrag_entries,
    enumerate_entries,
    most_exchanges,
    sampler_entries,
)
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.sampler import SamplerSetting, SamplerSpec
from aotgaudi.spec.vision import VisionSpec
from tests import specs
from tests.workload import tiny_spec


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

    assert Manifest.of(
        spec_of(defrag={"enabled": True, "padded_swaps": [4, 9, 13], "threshold": 14})
    ).of_kind("defrag") == (
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
    assert [entry.batch_size for entry in manifest.of_kind("sampler")][::18] == [1, 2]


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


def test_a_parameter_that_came_later_is_a_column_only_where_it_is_used() -> None:
    plain, cut = setting(0.7, 0.9), setting(1.0, top_n_sigma=1.5)
    constrained = setting(0.0, constraints=True)

    entries = sampler_entries([], SamplerSpec(settings=(plain, cut, constrained)))

    widths = {len(entry.row()) for entry in entries if entry.signature == plain.signature}
    assert widths == {SamplerEntry.num_always_stored}
    assert {entry.row()[-2:] for entry in entries if entry.top_n_sigma == 1.5} == {(False, 1.5)}
    assert {entry.row()[-1] for entry in entries if entry.temperature == 0} == {True}
    assert "top_n_sigma" not in cut.model_copy(update={"top_n_sigma": 0.0}).model_dump()
    (joined,) = {entry.row()[1:4] for entry in entries if entry.constraints and entry.top_n_sigma}
    assert joined == (1.0, 1.0, 0)


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


def side_spec_of(num_blocks: int, engine: str = "aotgaudi", **defrag: Any) -> BuildSpec:
    return specs.spec_of(
        config={"max_position_embeddings": 16},
        limits={**specs.ONE_BLOCK, "num_blocks": num_blocks},
        scheduler={"engine": engine},
        defrag={"enabled": True, **defrag},
    )


def sizes_of(spec: BuildSpec) -> list[int]:
    return [entry.padded_swaps for entry in defrag_entries(spec)]


def test_every_size_that_vllm_warms_up_is_a_defrag_entry() -> None:
    assert sizes_of(side_spec_of(2, "vllm")) == [8, 16, 32, 64, 128, 256, 512]
    assert sizes_of(side_spec_of(2, "vllm", padded_swaps=[3])) == [3]


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        (side_spec_of(1024, threshold=1), [8, 16, 32, 64, 128, 256, 512]),
        (side_spec_of(24, threshold=1), [8, 16]),  # at most 12 pairs of a used and a free block
        (side_spec_of(16, threshold=1), [8]),
        (side_spec_of(40), [8]),  # acts while fewer than 8 blocks are used
        (side_spec_of(34), [8]),
        (side_spec_of(33), []),  # the highest block is never more than 32 above the number of blocks in use
    ],
)
def test_sizes_that_our_engine_never_needs_are_left_out(spec: BuildSpec, sizes: list[int]) -> None:
    assert sizes_of(spec) == sizes


@given(st.integers(1, 60), st.integers(1, 12), st.sets(st.integers(1, 40), min_size=1), st.data())
def test_every_defragmentation_that_our_engine_plans_has_an_entry(
    num_blocks: int, threshold: int, sizes: set[int], data: st.DataObject
) -> None:
    spec = side_spec_of(num_blocks, threshold=threshold, padded_swaps=sorted(sizes))
    used = data.draw(st.sets(st.integers(1, num_blocks)))
    pool = BlockPool(num_blocks)
    pool.allocate(num_blocks)
    pool.free(sorted(set(range(1, num_blocks + 1)) - used))

    step = plan_step(pool, spec.defrag)

    assert step is None or step.entry in defrag_entries(spec)
    assert step is None or len(step.moves) <= most_exchanges(spec)


@pytest.mark.parametrize("engine", ["aotgaudi", "vllm"])
def test_there_are_no_defrag_entries_where_nothing_is_exchanged(engine: str) -> None:
    assert sizes_of(side_spec_of(1, engine)) == []
    assert sizes_of(side_spec_of(99, engine, enabled=False)) == []


FLASH = {"model_type": "deepseek_v4", "hidden_size": 4096, "max_position_embeddings": 100_000}
LLAMA = {"model_type": "llama", "hidden_size": 4096, "max_position_embeddings": 100_000}
H200 = {"backend": "cuda", "profile": "h200"}


def mhc_entries(spec: BuildSpec) -> tuple[Entry, ...]:
    return Manifest.of(spec).of_kind("mhc")


def mhc_spec_of(config: dict[str, Any] = FLASH, tokens: int = 8192, **tables: Any) -> BuildSpec:
    model = {"name": "m", "dtype": "bfloat16", "config": config}
    limits = {"max_num_batched_tokens": tokens, "block_size": 64}
    return specs.spec_of(model=model, limits=limits, **tables)


def test_each_representative_is_warm_for_attention_then_for_ffn_most_tokens_first() -> None:
    entries = mhc_entries(mhc_spec_of(target=H200))

    assert len(entries) == 2 * 21
    assert entries[:4] == (
        MhcEntry(8192, 1, "attn"),
        MhcEntry(8192, 1, "ffn"),
        MhcEntry(4224, 2, "attn"),
        MhcEntry(4224, 2, "ffn"),
    )
    assert entries[-1] == MhcEntry(128, 64, "ffn")


def test_the_budget_of_a_step_is_the_most_tokens_unless_the_spec_says_another() -> None:
    assert mhc_entries(mhc_spec_of(tokens=100, target=H200))[0].num_tokens == 100
    assert (
        mhc_entries(mhc_spec_of(tokens=100, target=H200, mhc={"max_num_tokens": 3000}))[0].num_tokens == 3000
    )


@pytest.mark.parametrize("backend", ["cpu", "hpu", "fake"])
def test_by_itself_our_engine_has_one_class_up_to_its_largest_step(backend: str) -> None:
    spec = mhc_spec_of(target={"backend": backend, "profile": "h200"})

    most = max(
        entry.num_tokens
        for entry in Manifest.of(spec).entries
        if isinstance(entry, (PromptEntry, DecodeEntry))
    )
    assert spec.mhc.rule == "one"
    assert mhc_entries(spec) == (MhcEntry(most, 1, "attn"), MhcEntry(most, 1, "ffn"))


def test_another_server_on_another_target_has_none_by_itself() -> None:
    spec = mhc_spec_of(target={"backend": "hpu", "profile": "h200"}, scheduler={"engine": "vllm"})

    assert spec.mhc.rule == "sglang-pr25810"
    assert mhc_entries(spec) == ()


@pytest.mark.parametrize("mhc", [{"enabled": True}, {"rule": "sglang-pr25810"}])
@pytest.mark.parametrize("backend", ["cpu", "hpu", "fake"])
def test_asked_for_every_target_has_the_classes_of_the_profiles_device(
    backend: str, mhc: dict[str, Any]
) -> None:
    asked = mhc_spec_of(target={"backend": backend, "profile": "h200"}, mhc={**mhc, "max_num_tokens": 8192})

    assert mhc_entries(asked) == mhc_entries(mhc_spec_of(target=H200))


def test_a_largest_count_that_is_less_than_a_step_has_is_refused() -> None:
    with pytest.raises(
        SpecError, match=r"mhc\.max_num_tokens: is 4, and a step of \(prompt.* tokens \(leave it out"
    ):
        mhc_entries(mhc_spec_of(mhc={"max_num_tokens": 4}))


def test_switched_off_other_servers_have_none_and_need_no_device() -> None:
    assert mhc_entries(mhc_spec_of(target={"backend": "cuda"}, mhc={"enabled": False})) == ()


def test_our_engine_cannot_switch_them_off() -> None:
    with pytest.raises(SpecError, match=r"mhc\.enabled: is false, but every step of 'deepseek_v4'"):
        mhc_spec_of(mhc={"enabled": False})


@pytest.mark.parametrize("tables", [{"target": {"backend": "cuda"}}, {"mhc": {"enabled": True}}])
def test_a_device_is_not_guessed(tables: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"target\.num_sms: is missing"):
        mhc_entries(mhc_spec_of(**tables))


def test_a_model_without_them_has_none_and_may_not_ask_for_them() -> None:
    assert mhc_entries(mhc_spec_of(LLAMA, target={"backend": "cuda"})) == ()
    with pytest.raises(SpecError, match=r"mhc\.enabled: is true, but 'llama'"):
        mhc_entries(mhc_spec_of(LLAMA, target=H200, mhc={"enabled": True}))


@pytest.mark.parametrize(
    ("rule", "splits"),
    [("vllm-collapsed", [1, 4, 16]), ("sglang-deepgemm-off", [1, 32]), ("sglang-fma", [8, 4, 64])],
)
def test_the_rule_decides(rule: str, splits: list[int]) -> None:
    entries = mhc_entries(mhc_spec_of(target=H200, mhc={"rule": rule}))

    assert [entry.n_splits for entry in entries if entry.sublayer == "attn"][:3] == splits


def test_a_huge_budget_has_as_few_entries_as_a_small_one() -> None:
    assert len(mhc_entries(mhc_spec_of(target=H200, mhc={"max_num_tokens": 10**9}))) == 2 * 21


def vision_entries(model_type: str, vision: VisionSpec, **config: object) -> list[VisionEntry]:
    spec = tiny_spec()
    config = {**spec.model.config, "model_type": model_type, **config}
    model = spec.model.model_copy(update={"config": config})
    spec = spec.model_copy(update={"vision": vision, "model": model})
    return [entry for entry in enumerate_entries(spec) if isinstance(entry, VisionEntry)]


@pytest.mark.parametrize(
    ("model_type", "vision", "expected"),
    [
        ("gemma3", VisionSpec(), []),
        ("gemma3", VisionSpec(enabled=True), [(1, True), (2, True), (4, True), (8, True)]),
        ("pixtral", VisionSpec(enabled=True, buckets=(2048, 512, 512)), [(512, False), (2048, False)]),
        ("pixtral", VisionSpec(enabled=True, buckets=()), []),
        ("gemma4", VisionSpec(enabled=True), []),
    ],
)
def test_the_sizes_of_the_models_tower_are_warm_where_vision_is_on(
    model_type: str, vision: VisionSpec, expected: list[tuple[int, bool]]
) -> None:
    assert [entry.row() for entry in vision_entries(model_type, vision)] == expected


def sizes(model_type: str, *resolutions: str, max_images: int = 1, patch_size: int = 16) -> list[int]:
    vision = VisionSpec(enabled=True, resolutions=resolutions, max_images=max_images)
    tower = {"patch_size": patch_size, "spatial_merge_size": 2}
    return [entry.size for entry in vision_entries(model_type, vision, vision_config=tower)]


def test_each_number_of_images_of_a_resolution_is_a_size_where_the_tower_does_not_pad() -> None:
    """864x480 is 27 by 15 merged patches of 32 pixels: 54 * 30 patches."""
    assert sizes("qwen3_5") == []
    assert sizes("qwen3_5", "864x480") == [1620]
    assert sizes("qwen3_5", "864x480", max_images=3) == [3 * 1620]
    assert sizes("qwen3_5", "864x480x2", max_images=3) == [2 * 1620]
    assert sizes("qwen3_5", "864x480x1-20", max_images=3) == [1620, 2 * 1620, 3 * 1620]
    assert sizes("qwen3_5", "864x480x1-20", "864x480x1") == [1620]


def test_the_images_that_upstream_guesses_for_a_size_are_warm_as_well() -> None:
    """Of 196 patches, 14 by 14: 14x14, 4:3 as 18x14, 3:4 as 10x14, 16:9 as 24x14, 9:16 as 8x14."""
    assert {14 * 14, 18 * 14, 10 * 14, 24 * 14, 8 * 14} <= set(sizes("qwen3_vl"))


def test_a_tower_that_pads_each_image_runs_the_next_size_or_the_images_own() -> None:
    listed = sizes("qwen2_5_vl", patch_size=14)

    assert set(sizes("qwen2_5_vl", "560x560x7", max_images=9, patch_size=14)) == set(listed)
    assert set(sizes("qwen2_5_vl", "2800x2800", patch_size=14)) - set(listed) == {200 * 200}


@pytest.mark.parametrize(
    ("model_type", "config", "problem"),
    [
        ("gemma3", {"vision_config": {"patch_size": 14}}, "by the number of images"),
        ("kimi_k25", {"vision_config": {"patch_size": 14}}, "how its processor cuts images is not known"),
        ("qwen3_5", {}, r"no vision_config\.patch_size"),
        ("qwen3_5", {"vision_config": {"patch_size": "14"}}, r"no vision_config\.patch_size"),
    ],
)
def test_resolutions_that_cannot_become_entries_are_refused(
    model_type: str, config: dict[str, object], problem: str
) -> None:
    vision = VisionSpec(enabled=True, resolutions=("864x480",))

    with pytest.raises(SpecError, match=rf"vision\.resolutions: .*{problem}"):
        vision_entries(model_type, vision, **config)
