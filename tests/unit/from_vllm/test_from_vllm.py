from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.digest import sha256_bytes
from aotgaudi.entries import VisionEntry
from aotgaudi.errors import SpecError
from aotgaudi.from_vllm.command import VllmCommand
from aotgaudi.from_vllm.limits import Pin
from aotgaudi.from_vllm.serving import MODE_NOTES
from aotgaudi.from_vllm.spec import Report, VllmSetup, spec_from_vllm
from aotgaudi.manifest.coverage import left_out
from aotgaudi.manifest.enumerate import enumerate_entries
from aotgaudi.manifest.manifest import Manifest, dumps, loads
from aotgaudi.manifest.memory import kv_cache_bytes
from aotgaudi.spec.bucketing import NEWEST_RELEASE, AxisBounds, SlidingSpec, VersionName
from aotgaudi.spec.build_spec import BuildSpec, LoraSpec
from aotgaudi.spec.quantization import QuantizationSpec
from aotgaudi.spec.scheduler import DefragSpec, SchedulerSpec

NEWEST = "vllm-gaudi@091bbad"
GAUDI_1_22 = "vllm-hpu-extension@8211e0b"
PINNED = Pin(num_blocks=4096)
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}


def read(
    flags: str = "",
    *,
    version: str | None = NEWEST,
    config: dict[str, Any] | None = None,
    pin: Pin = PINNED,
    **environment: str,
) -> tuple[BuildSpec, Report]:
    setup = VllmSetup(
        command=VllmCommand.parse(f"vllm serve org/model {flags}"),
        environment=environment,
        config=LLAMA if config is None else config,
        version=version,
        pin=pin,
        read_file=lambda path: f"# {path}",
        digest_file=lambda path: sha256_bytes(path.encode()),
    )
    return spec_from_vllm(setup)


def spec(flags: str = "", **rest: Any) -> BuildSpec:
    return read(flags, **rest)[0]


def notes(flags: str = "", **rest: Any) -> str:
    return "\n".join(read(flags, **rest)[1].notes)


def mistake(flags: str = "", **rest: Any) -> SpecError:
    with pytest.raises(SpecError) as caught:
        read(flags, **rest)
    assert "\n" not in str(caught.value)
    return caught.value


def test_the_defaults_of_a_server_on_gaudi_are_filled_in_and_listed() -> None:
    found, report = read()

    assert (found.limits.max_num_seqs, found.limits.max_num_prefill_seqs) == (256, 1)
    assert (found.limits.max_num_batched_tokens, found.limits.max_model_len) == (2048, 8192)
    assert (found.limits.block_size, found.limits.num_blocks) == (128, 4096)
    assert (found.model.name, found.model.dtype, found.model.config) == ("org/model", "bfloat16", LLAMA)
    assert (found.target.backend, found.target.execution_mode) == ("hpu", "torch_compile")
    assert (found.bucketing.strategy, found.bucketing.version) == ("exponential", NEWEST)
    assert (found.bucketing.contiguous_pa, found.bucketing.prefix_caching) == (False, True)
    assert (found.sampler.smallest_batch_size, found.defrag.enabled, found.vision.enabled) == (
        1,
        False,
        False,
    )
    assert report.assumed == (
        "--max-model-len 8192",
        "--max-num-batched-tokens 2048",
        "--max-num-seqs 256",
        "--block-size 128",
        "PT_HPU_LAZY_MODE=0 (its default changed between releases: always set it)",
    )


def test_what_the_command_says_is_taken() -> None:
    found, report = read(
        "--max-num-seqs 16 --max-num-batched-tokens 4K --max-model-len 4k --block-size 64 --served-model-name chat x",
        PT_HPU_LAZY_MODE="1",
    )

    limits = found.limits
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len) == (16, 4096, 4000)
    assert (limits.block_size, found.model.name) == (64, "chat")
    assert report.assumed == ()


def test_a_batch_is_never_larger_than_its_tokens_by_default() -> None:
    assert spec("--max-num-batched-tokens 128").limits.max_num_seqs == 128
    assert spec("--max-num-seqs 4 --max-model-len 256").limits.max_num_batched_tokens == 1024


def test_without_chunked_prefill_a_whole_prompt_fits_a_step() -> None:
    assert spec("--no-enable-chunked-prefill").limits.max_num_batched_tokens == 8192
    assert spec(version=GAUDI_1_22).limits.max_num_batched_tokens == 8192
    assert spec("--enable-chunked-prefill", version=GAUDI_1_22).limits.max_num_batched_tokens == 2048


def test_prefill_batches_by_version() -> None:
    assert spec(VLLM_PROMPT_BS_BUCKET_MAX="4").limits.max_num_prefill_seqs == 4
    assert spec("--max-num-seqs 8", VLLM_MERGED_PREFILL="1").limits.max_num_prefill_seqs == 8
    assert spec("--max-num-seqs 8", version=GAUDI_1_22).limits.max_num_prefill_seqs == 8
    assert spec("--max-num-prefill-seqs 2", version=GAUDI_1_22).limits.max_num_prefill_seqs == 2
    assert spec("--max-num-prefill-seqs 2").limits.max_num_prefill_seqs == 1
    for name in ("VLLM_PROMPT_BS_BUCKET_MAX", "VLLM_MERGED_PREFILL"):
        assert spec(version="vllm-gaudi@v0.10.1", **{name: "1"}).limits.max_num_prefill_seqs == 1


@pytest.mark.parametrize(
    ("flags", "environment", "where"),
    [
        ("--max-num-seqs 200 --max-num-batched-tokens 129", {}, "--max-num-seqs"),
        ("--max-num-seqs 4096", {}, "--max-num-seqs"),
        ("", {"pin": Pin(num_blocks=64)}, "the number of KV blocks"),
        ("--max-num-seqs 2 --max-num-prefill-seqs 4", {"version": GAUDI_1_22}, "--max-num-prefill-seqs"),
        ("--max-model-len 10000", {}, "--max-model-len"),
        ("--max-model-len 1", {}, "--max-model-len"),
        ("--max-model-len auto", {}, "--max-model-len"),
        ("--max-num-batched-tokens 64", {}, "--max-num-batched-tokens"),
        ("--num-gpu-blocks-override 3", {"pin": Pin()}, "the number of KV blocks"),
        ("--num-gpu-blocks-override 0", {"pin": Pin()}, "--num-gpu-blocks-override"),
        ("--served-model-name ''", {}, "--served-model-name"),
        ("", {"config": {**LLAMA, "max_position_embeddings": None}}, "--max-model-len"),
        (
            "--max-model-len 9",
            {"config": {"max_position_embeddings": 9}},
            "the model's config.json: model_type",
        ),
        ("", {"config": {**LLAMA, "x": 2**60}}, "the model's config.json: x"),
        ("--dtype int8", {}, "--dtype"),
        ("", {"VLLM_ENABLE_BUCKETING": "false"}, "VLLM_ENABLE_BUCKETING"),
        ("", {"PT_HPU_LAZY_MODE": "true"}, "PT_HPU_LAZY_MODE"),
        ("", {"VLLM_GRAPH_RESERVED_MEM": "1"}, "VLLM_GRAPH_RESERVED_MEM"),
        ("", {"VLLM_DEFRAG_THRESHOLD": "none"}, "VLLM_DEFRAG_THRESHOLD"),
        ("", {"VLLM_MULTIMODAL_BUCKETS": "1,x"}, "VLLM_MULTIMODAL_BUCKETS"),
        ("--gpu-memory-utilization 2", {}, "--gpu-memory-utilization"),
        ("--speculative-config []", {}, "--speculative-config"),
        ("--speculative-config {}", {}, "--speculative-config num_speculative_tokens"),
        ("--limit-mm-per-prompt image:3", {}, "--limit-mm-per-prompt"),
        ("--limit-mm-per-prompt '{\"image\": -1}'", {}, "--limit-mm-per-prompt"),
        (
            "",
            {
                "VLLM_BUCKETING_STRATEGY": "lin",
                "VLLM_PROMPT_SEQ_BUCKET_MIN": "9",
                "VLLM_PROMPT_SEQ_BUCKET_MAX": "8",
            },
            "VLLM_PROMPT_SEQ_BUCKET_MIN",
        ),
    ],
)
def test_mistakes_name_the_flag_or_variable(flags: str, environment: dict[str, Any], where: str) -> None:
    assert mistake(flags, **environment).where == where


@pytest.mark.parametrize(
    ("lazy", "flags", "mode"),
    [
        ("1", "", "hpu_graphs"),
        ("1", "--enforce-eager", "lazy"),
        ("0", "", "torch_compile"),
        ("0", "--enforce-eager", "eager"),
    ],
)
def test_the_four_execution_modes_and_what_each_needs_warm(lazy: str, flags: str, mode: Any) -> None:
    found, report = read(flags, PT_HPU_LAZY_MODE=lazy)

    assert found.target.execution_mode == mode
    assert report.notes[0] == MODE_NOTES[mode]


@pytest.mark.parametrize("version", get_args(VersionName))
def test_no_known_release_is_lazy_by_default(version: str) -> None:
    found, report = read(version=version)

    assert found.target.execution_mode == "torch_compile"
    assert any(line.startswith("PT_HPU_LAZY_MODE=0 ") for line in report.assumed)


def test_the_version_is_among_the_assumptions_unless_it_is_given() -> None:
    assumed = read(version=None)[1].assumed

    assert assumed[0] == f"--bucketing-version {NEWEST_RELEASE} (the newest release; give your server's)"
    assert spec(version=None) == spec(version=NEWEST_RELEASE)
    assert not any("--bucketing-version" in line for line in read()[1].assumed)


def test_blocks_are_pinned_by_the_option_then_by_the_command() -> None:
    assert spec("--num-gpu-blocks-override 5000").limits.num_blocks == 4096
    assert spec("--num-gpu-blocks-override 5000", pin=Pin()).limits.num_blocks == 5000
    assert spec("--num-gpu-blocks-override 5000", pin=Pin(free_bytes=1)).limits.num_blocks == 5000


def test_blocks_that_are_pinned_nowhere_are_refused_with_the_ways_to_pin_them() -> None:
    error = mistake(pin=Pin())

    assert error.where == "the number of KV blocks"
    for way in ("--num-gpu-blocks-override N", "--num-blocks N", "--free-memory 92GiB"):
        assert way in error.remedy


def test_blocks_from_free_memory_by_upstreams_formula() -> None:
    free = Pin(free_bytes=int(79.22 * 2**30))

    assert spec(pin=free).limits.num_blocks == 4105
    assert spec("--gpu-memory-utilization 0.5", pin=free).limits.num_blocks == 2280
    assert spec(pin=free, VLLM_GRAPH_RESERVED_MEM="0.4").limits.num_blocks == 2736
    assert spec("--enforce-eager", pin=free, VLLM_GRAPH_RESERVED_MEM="0.4").limits.num_blocks == 4562
    assert spec(pin=free, version=GAUDI_1_22).limits.num_blocks == 4106


def test_the_report_says_where_the_blocks_are_from_and_how_to_serve_with_them() -> None:
    assert "add --num-gpu-blocks-override 4105 to the vLLM command" in notes(
        pin=Pin(free_bytes=int(79.22 * 2**30))
    )
    assert "add --num-gpu-blocks-override 4096" in notes()
    assert "add" not in notes("--num-gpu-blocks-override 4096")
    assert "no effect, as the number of KV blocks is given" in notes("--gpu-memory-utilization 0.8")


def test_memory_for_not_one_block_is_refused() -> None:
    assert mistake(pin=Pin(free_bytes=10)).where == "--free-memory"


@pytest.mark.parametrize(
    ("flags", "config", "dtype", "is_noted"),
    [
        ("", "bfloat16", "bfloat16", False),
        ("--dtype bfloat16", "float16", "bfloat16", False),
        ("", "float16", "bfloat16", True),
        ("--dtype half", "bfloat16", "bfloat16", True),
        ("--dtype auto", None, "bfloat16", True),
    ],
)
def test_gaudi_serves_bfloat16(flags: str, config: str | None, dtype: str, is_noted: bool) -> None:
    values = {**LLAMA, "torch_dtype": config}

    assert spec(flags, config=values).model.dtype == dtype
    assert ("Gaudi serves bfloat16" in notes(flags, config=values)) is is_noted


def test_the_extension_serves_float32_too() -> None:
    assert spec("--dtype float32", version=GAUDI_1_22).model.dtype == "float32"


@pytest.mark.parametrize(
    ("version", "environment", "enabled"),
    [
        (NEWEST, {}, False),
        (NEWEST, {"VLLM_CONTIGUOUS_PA": "1"}, True),
        (NEWEST, {"VLLM_CONTIGUOUS_PA": "1", "VLLM_DEFRAG": "0"}, False),
        (NEWEST, {"VLLM_DEFRAG": "1"}, True),
        ("vllm-gaudi@v0.20.0rc0", {"VLLM_CONTIGUOUS_PA": "1"}, False),
        ("vllm-gaudi@v0.20.0rc0", {"VLLM_DEFRAG": "1"}, True),
        ("vllm-gaudi@v0.17.1", {"VLLM_CONTIGUOUS_PA": "1"}, False),
        ("vllm-gaudi@v0.17.1", {"VLLM_UNIFIED_ATTN": "1"}, True),
        ("vllm-gaudi@v0.10.1", {"VLLM_DEFRAG": "1"}, False),
        (GAUDI_1_22, {"VLLM_DEFRAG": "1"}, False),
        ("vllm-hpu-extension@7717587", {"VLLM_DEFRAG": "1"}, True),
    ],
)
def test_what_enables_the_defragmenter(version: str, environment: dict[str, str], enabled: bool) -> None:
    assert spec(version=version, **environment).defrag.enabled is enabled


def test_the_defragmenters_threshold_and_graphs() -> None:
    assert spec(VLLM_DEFRAG_THRESHOLD="8", PT_HPU_LAZY_MODE="1").defrag == DefragSpec(
        enabled=False, threshold=8, with_graphs=False
    )
    assert spec(PT_HPU_LAZY_MODE="0").defrag.with_graphs
    assert spec(PT_HPU_LAZY_MODE="1", VLLM_DEFRAG_WITH_GRAPHS="yes").defrag.with_graphs
    assert spec(PT_HPU_LAZY_MODE="0").defrag.threshold == 32


def test_versions_without_a_defragmenter_ignore_its_variables() -> None:
    _, report = read(version="vllm-gaudi@v0.10.1", VLLM_DEFRAG="1")

    assert [(one.name, one.reason) for one in report.ignored] == [
        ("VLLM_DEFRAG", "vllm-gaudi@v0.10.1 has no defragmenter")
    ]


@pytest.mark.parametrize(
    ("version", "smallest"),
    [(NEWEST, 1), ("vllm-gaudi@v0.16.0", 1), ("vllm-gaudi@v0.14.1", 0), ("vllm-gaudi@v0.11.2", 0)],
)
def test_the_smallest_batch_of_the_sampler(version: str, smallest: int) -> None:
    assert spec(version=version).sampler.smallest_batch_size == smallest


def test_a_version_that_warms_no_sampler_is_noted() -> None:
    assert "vllm-gaudi@v0.10.1 warms up no sampler" in notes(version="vllm-gaudi@v0.10.1")


def test_the_environments_bucketing_is_the_specs() -> None:
    found = spec(
        VLLM_BUCKETING_STRATEGY="pad",
        VLLM_CONTIGUOUS_PA="true",
        VLLM_DECODE_BS_BUCKET_PAD_MAX="16",
        PT_HPU_SDPA_QKV_SLICE_MODE_FWD="1",
    ).bucketing

    assert (found.strategy, found.contiguous_pa, found.prefix_caching) == ("padding_aware", True, False)
    assert (found.decode.batch_size, found.sliding) == (AxisBounds(pad_max=16), SlidingSpec())


def test_a_bucket_file_is_read_and_embedded() -> None:
    found = spec(VLLM_BUCKETING_FROM_FILE="b.txt").bucketing

    assert (found.strategy, found.file_text) == ("file", "# b.txt")


def test_assignments_in_the_command_come_before_the_environment() -> None:
    setup = VllmSetup(
        command=VllmCommand.parse("VLLM_BUCKETING_STRATEGY=lin vllm serve m"),
        environment={"VLLM_BUCKETING_STRATEGY": "pad"},
        config=LLAMA,
        version=NEWEST,
        pin=Pin(num_blocks=65),
        read_file=str,
        digest_file=str,
    )

    assert spec_from_vllm(setup)[0].bucketing.strategy == "linear"


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ("", 0),
        ("""--speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'""", 3),
        ("--speculative-config.num_speculative_tokens 2", 2),
        ("--num-speculative-tokens 4", 4),
    ],
)
def test_speculative_tokens(flags: str, tokens: int) -> None:
    assert spec(flags).bucketing.num_speculative_tokens == tokens
    assert ("draft model" in notes(flags)) is bool(tokens)


@pytest.mark.parametrize("value", ["0", "-1", '"3"', "true", "1.5", "2000"])
def test_other_numbers_of_speculative_tokens_are_refused(value: str) -> None:
    where = mistake(f"--speculative-config '{{\"num_speculative_tokens\": {value}}}'").where

    assert where == "--speculative-config num_speculative_tokens"


def test_recurrent_layers() -> None:
    config = {**LLAMA, "layer_types": ["linear_attention", "full_attention"], "chunk_size": 64}
    found = spec(config=config).bucketing

    assert (found.mamba_chunk_size, found.mamba_chunk_size_is_explicit) == (64, True)
    assert found.skip_decode_block_clamp
    assert "recurrent layers" in notes(config=config)
    assert mistake("--max-num-batched-tokens 200", config=config).where == "--max-num-batched-tokens"
    assert mistake(config=config, pin=Pin(free_bytes=2**36)).where == "--free-memory"


def test_interleaved_windows_skip_the_clamp_of_decode_blocks() -> None:
    config = {**LLAMA, "sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]}

    assert spec(config=config).bucketing.skip_decode_block_clamp
    assert not spec().bucketing.skip_decode_block_clamp


@pytest.mark.parametrize(
    ("flags", "enabled"),
    [
        ("", True),
        ("--limit-mm-per-prompt image=2", True),
        ("--limit-mm-per-prompt image=0,video=0", False),
        ("""--limit-mm-per-prompt '{"image": 0, "video": {"count": 0}}'""", False),
        ("""--limit-mm-per-prompt '{"image": 0}'""", True),
        ("--limit-mm-per-prompt.image 0 --limit-mm-per-prompt.video 0", False),
        ("--language-model-only", False),
    ],
)
def test_vision_is_on_for_models_that_take_images(flags: str, enabled: bool) -> None:
    config = {"model_type": "qwen2_5_vl", "vision_config": {}, "text_config": LLAMA}

    assert spec(flags, config=config).vision.enabled is enabled
    assert not spec(flags).vision.enabled


@pytest.mark.parametrize(
    ("flags", "max_images"),
    [
        ("", 1),
        ("--limit-mm-per-prompt image=20", 20),
        ("""--limit-mm-per-prompt '{"image": 0, "video": {"count": 3}}'""", 3),
    ],
)
def test_a_resolution_of_the_environment_becomes_entries_up_to_the_images_of_a_prompt(
    flags: str, max_images: int
) -> None:
    tower = {"patch_size": 16, "spatial_merge_size": 2}
    config = {"model_type": "qwen3_5", "vision_config": tower, "text_config": LLAMA}

    found = spec(flags, config=config, VLLM_MULTIMODAL_RESOLUTIONS="864x480x1-50")

    assert found.vision.max_images == max_images
    entries = [entry for entry in enumerate_entries(found) if isinstance(entry, VisionEntry)]
    assert [entry.size for entry in entries] == [1620 * count for count in range(1, max_images + 1)]


def test_buckets_and_resolutions_of_vision() -> None:
    found = spec(VLLM_MULTIMODAL_BUCKETS="1600,4096", VLLM_MULTIMODAL_RESOLUTIONS=" 10x20 , 30x40x2").vision

    assert (found.buckets, found.resolutions) == ((1600, 4096), ("10x20", "30x40x2"))
    assert spec(VLLM_MULTIMODAL_BUCKETS="", VLLM_MULTIMODAL_RESOLUTIONS="").vision.buckets is None
    assert spec(VLLM_MULTIMODAL_BUCKETS="None").vision.buckets == ()


def test_other_variables_are_sorted_by_whether_they_change_code() -> None:
    _, report = read(
        "--port 1", VLLM_PROMPT_USE_FUSEDSDPA="1", PT_HPU_WEIGHT_SHARING="0", VLLM_API_KEY="secret", HOME="/x"
    )

    assert [one.name for one in report.unknown] == ["PT_HPU_WEIGHT_SHARING", "VLLM_PROMPT_USE_FUSEDSDPA"]
    assert [one.name for one in report.harmless] == ["--port", "VLLM_API_KEY"]
    assert not any("secret" in line for line in report.lines())


def test_further_notes() -> None:
    assert "VLLM_SKIP_WARMUP" in notes(VLLM_SKIP_WARMUP="true")
    assert "VLLM_SKIP_WARMUP" not in notes(VLLM_SKIP_WARMUP="false")
    assert "quantized" in notes(config={**LLAMA, "quantization_config": {}})


def test_the_report_in_lines() -> None:
    _, report = read(
        "--port 1 --api-key k --seed 2 --model-impl vllm",
        VLLM_DECODE_BS_BUCKET_STEP="4",
        PT_HPU_LAZY_MODE="0",
        VLLM_HOST_IP="::1",
        VLLM_CONTIGOUS_PA="true",
    )
    lines = list(report.lines())

    assert lines[0].startswith("note: torch_compile: ")
    assert "ignored: VLLM_DECODE_BS_BUCKET_STEP=4: the exponential strategy does not read it" in lines
    assert "assumed: --block-size 128" in lines
    assert lines[-4:] == [
        "may change what is warm: --model-impl: chooses the model's code",
        "may change what is warm: VLLM_CONTIGOUS_PA: not known: did you mean VLLM_CONTIGUOUS_PA?",
        "no effect on what is warm: --seed: values, not shapes",
        "no effect on what is warm: --port, --api-key, VLLM_HOST_IP: where and how the server listens",
    ]


def test_what_decides_which_graphs_traffic_compiles_is_in_the_spec_only_if_the_command_says_it() -> None:
    plain, asked = spec(), spec("--max-logprobs 3", VLLM_T_COMPILE_DYNAMIC_SHAPES="0")

    assert set(plain.scheduler.model_dump()) == {"engine", "chunked_prefill"}
    assert (asked.scheduler.static_shapes, asked.scheduler.max_logprobs) == (True, 3)
    assert spec("--max-logprobs=-1").scheduler.max_logprobs == -1
    assert spec(VLLM_T_COMPILE_DYNAMIC_SHAPES="true") == plain
    assert mistake("--max-logprobs many").where == "--max-logprobs"
    compiled = {"PT_HPU_LAZY_MODE": "0"}
    dynamic = "graphs of shapes that are traced as dynamic ones"
    assert any(text.startswith(dynamic) for text in left_out(spec(**compiled)))
    static = left_out(spec(**compiled, VLLM_T_COMPILE_DYNAMIC_SHAPES="false"))
    assert static == left_out(spec(**compiled), is_static=True)
    assert not any(text.startswith(dynamic) for text in static)


def test_the_server_is_vllms_and_computes_prompts_in_chunks_or_whole() -> None:
    assert spec().scheduler == SchedulerSpec(engine="vllm")
    assert not spec("--no-enable-chunked-prefill").scheduler.chunked_prefill
    assert not spec(version=GAUDI_1_22).scheduler.chunked_prefill
    assert spec("--enable-chunked-prefill", version=GAUDI_1_22).scheduler.chunked_prefill
    error = mistake("--no-enable-chunked-prefill --max-num-batched-tokens 4096")
    assert (error.where, "at least max_model_len" in error.remedy) == ("--max-num-batched-tokens", True)


@pytest.mark.parametrize("variable", ["1", "true", "True "])
def test_a_length_beyond_the_models_positions_is_allowed_with_a_note(variable: str) -> None:
    found = spec("--max-model-len 10000", VLLM_ALLOW_LONG_MAX_MODEL_LEN=variable)

    assert (found.limits.max_model_len, found.limits.allow_long_max_model_len) == (10000, True)
    assert "more than the model's 8192 positions" in notes(
        "--max-model-len 10000", VLLM_ALLOW_LONG_MAX_MODEL_LEN=variable
    )


def test_a_length_within_them_needs_no_permission() -> None:
    found, report = read("--max-model-len 8192", VLLM_ALLOW_LONG_MAX_MODEL_LEN="1")

    assert not found.limits.allow_long_max_model_len
    assert not any("VLLM_ALLOW_LONG_MAX_MODEL_LEN" in line for line in report.lines())
    for value in ("0", "yes"):
        error = mistake("--max-model-len 10000", VLLM_ALLOW_LONG_MAX_MODEL_LEN=value)
        assert (error.where, "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1" in error.remedy) == ("--max-model-len", True)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}


def test_the_length_that_vllm_derives_is_served_and_its_rule_is_printed() -> None:
    found, report = read(config={**LLAMA, "rope_scaling": YARN}, version="vllm-gaudi@v0.24.0")

    assert (found.limits.max_model_len, found.limits.allow_long_max_model_len) == (32768, True)
    assert (
        "max_model_len 32,768: original_max_position_embeddings 8,192 x factor 4 (yarn), as vLLM 0.24.0"
        in report.notes
    )
    assert "max_model_len 8,192: max_position_embeddings 8,192, as vLLM 0.24.0" in notes(
        version="vllm-gaudi@v0.24.0"
    )


def test_a_length_that_this_vllm_takes_is_taken() -> None:
    config = {**LLAMA, "rope_scaling": YARN}

    assert spec("--max-model-len 32768", config=config).limits.max_model_len == 32768
    assert "at most original_max_position_embeddings" in notes("--max-model-len 20000", config=config)
    error = mistake("--max-model-len 32769", config=config)
    assert "x factor 4 (yarn), as vLLM 0.27.1" in error.problem
    assert spec("--max-model-len 32769", config=config, VLLM_ALLOW_LONG_MAX_MODEL_LEN="1")


def test_a_config_that_tells_no_length_leaves_it_to_the_command() -> None:
    config = {name: value for name, value in LLAMA.items() if name != "max_position_embeddings"}

    assert spec("--max-model-len 4096", config=config).limits.max_model_len == 4096
    assert "does not check that the model supports --max-model-len 4096" in notes(
        "--max-model-len 4096", config=config
    )
    assert mistake(config=config).where == "--max-model-len"


def test_a_prompt_batch_above_the_sequences_is_the_plugins_to_use() -> None:
    found = spec("--max-num-seqs 2", VLLM_PROMPT_BS_BUCKET_MAX="4")

    assert (found.limits.max_num_prefill_seqs, found.limits.max_num_seqs) == (4, 2)


PAD = {"VLLM_BUCKETING_STRATEGY": "pad"}


@pytest.mark.parametrize(
    ("flags", "environment", "where"),
    [
        ("--max-num-batched-tokens 1023 --max-num-seqs 8", {}, "--max-num-batched-tokens"),
        ("--max-num-batched-tokens 1024 --block-size 1024 --max-num-seqs 8", {}, "--max-num-batched-tokens"),
        ("--block-size 1024", {}, "--block-size"),
        ("", {"VLLM_EXPONENTIAL_BUCKETING": "false"}, "VLLM_EXPONENTIAL_BUCKETING"),
        ("", {"VLLM_HPU_FSDPA_SLICE_SEQ_LEN_THLD": "512"}, "VLLM_HPU_FSDPA_SLICE_SEQ_LEN_THLD"),
        ("", {"VLLM_HPU_FSDPA_SLICE_CHUNK_SIZE": "4096"}, "VLLM_HPU_FSDPA_SLICE_CHUNK_SIZE"),
        ("", {"VLLM_PROMPT_QUERY_BUCKET_PAD_MAX": "64"}, "VLLM_PROMPT_QUERY_BUCKET_PAD_MAX"),
    ],
)
def test_attention_in_slices_comes_with_pad_and_must_fit(
    flags: str, environment: dict[str, str], where: str
) -> None:
    assert mistake(flags, **PAD, **environment).where == where
    assert spec(flags, **PAD, **environment, VLLM_HPU_FSDPA_SLICE_ENABLED="0")
    assert spec(flags, **PAD, **environment, VLLM_MERGED_PREFILL="1")


def test_a_slice_of_no_tokens_is_refused_where_the_plugin_divides_by_it() -> None:
    slices = {"PT_HPU_SDPA_QKV_SLICE_MODE_FWD": "1", "PT_HPU_SDPA_BC_FACTOR": "0"}

    assert mistake("--max-num-batched-tokens 8192", **slices).where == "PT_HPU_SDPA_BC_FACTOR"
    assert spec("--max-num-batched-tokens 4096", **slices)


def test_an_empty_decode_range_under_contiguous_attention_is_refused_in_a_sentence() -> None:
    bounds = {"MIN": "200", "STEP": "128", "MAX": "200"}
    environment = {f"VLLM_DECODE_BLOCK_BUCKET_{name}": value for name, value in bounds.items()}
    found = spec(VLLM_BUCKETING_STRATEGY="lin", VLLM_CONTIGUOUS_PA="1", **environment)

    with pytest.raises(SpecError, match="leave no decode bucket"):
        enumerate_entries(found)


def test_pad_without_slices_takes_few_tokens_in_v0_20_0rc0() -> None:
    flags = "--max-num-batched-tokens 512 --max-num-seqs 8"

    assert spec(flags, version="vllm-gaudi@v0.20.0rc0", **PAD).bucketing.strategy == "padding_aware"


def test_unified_attention_without_merged_prefill_is_refused() -> None:
    error = mistake(version="vllm-gaudi@v0.17.1", VLLM_UNIFIED_ATTN="1", VLLM_MERGED_PREFILL="0")

    assert error.where == "VLLM_MERGED_PREFILL"


def test_vllm_keeps_one_block_for_itself() -> None:
    flags = "--max-model-len 300 --max-num-seqs 2"

    assert spec(flags, pin=Pin(num_blocks=4)).limits.num_blocks == 4
    assert "null block" in mistake(flags, pin=Pin(num_blocks=3)).problem
    assert spec(flags, pin=Pin(num_blocks=3), version=GAUDI_1_22).limits.num_blocks == 3


def test_the_quantization_that_a_command_asks_for() -> None:
    found = spec("--quantization inc --kv-cache-dtype fp8_inc", QUANT_CONFIG="/q/maxabs_quant_g3.json")

    assert found.model.quantization == QuantizationSpec(
        method="inc", kv_cache_dtype="fp8_inc", config_sha256=sha256_bytes(b"/q/maxabs_quant_g3.json")
    )
    assert spec("-q awq_hpu").model.quantization == QuantizationSpec(method="awq_hpu")
    for flags in ("", "-q None", "--kv-cache-dtype auto", "--kv-cache-dtype bfloat16"):
        assert spec(flags).model.quantization is None


def test_quant_config_alone_turns_quantization_on() -> None:
    found, report = read(QUANT_CONFIG="q.json")

    assert found.model.quantization == QuantizationSpec(method="inc", config_sha256=sha256_bytes(b"q.json"))
    assert any("QUANT_CONFIG alone turns on quantization" in note for note in report.notes)
    assert found.model.signature() != spec().model.signature()


def test_an_fp8_cache_has_twice_the_blocks() -> None:
    free = Pin(free_bytes=int(79.22 * 2**30))

    assert spec("--kv-cache-dtype fp8_inc", pin=free).limits.num_blocks == 8212
    assert spec("-tp 8", pin=free).limits.num_blocks == 32853
    assert spec("-tp 16", pin=free, config=LLAMA).limits.num_blocks == 32853
    assert spec("-pp 2", pin=free).limits.num_blocks == 8212
    assert spec("-pp 2", pin=free, version=GAUDI_1_22).limits.num_blocks == 4106


def test_the_extension_divides_the_blocks_among_the_stages_of_a_pipeline() -> None:
    override = "-pp 2 --num-gpu-blocks-override 5000"

    assert spec(override, pin=Pin(), version=GAUDI_1_22).limits.num_blocks == 2500
    assert spec(override, pin=Pin()).limits.num_blocks == 5000
    assert spec("-pp 2", version=GAUDI_1_22).limits.num_blocks == 4096
    told = notes("-pp 2", version=GAUDI_1_22)
    assert (
        "8192 KV blocks, from --num-blocks\n2 schedulers, one for each stage, have 4096 of them each" in told
    )
    assert "add --num-gpu-blocks-override 8192" in told


def test_adapter_slots() -> None:
    assert spec().lora is None
    assert spec("--max-loras 4").lora is None
    assert spec("--enable-lora").lora == LoraSpec()
    assert spec("--enable-lora --max-loras 4 --max-lora-rank 64 --lora-dtype half").lora == LoraSpec(
        max_loras=4, max_lora_rank=64, dtype="float16"
    )
    assert spec("--enable-lora", version=GAUDI_1_22).lora == LoraSpec(extra_vocab_size=256)
    assert spec("--enable-lora --lora-modules a=b c=d").lora == LoraSpec()


VALIDATED: tuple[tuple[str, int, int, int, str], ...] = (
    ("meta-llama/Meta-Llama-3-8B", 32, 32, 8, "-tp 8"),
    ("meta-llama/Meta-Llama-3-70B-Instruct", 80, 64, 8, "-tp 8"),
    ("meta-llama/Meta-Llama-3.1-70B", 80, 64, 8, "--tensor-parallel-size 4 --quantization inc"),
    ("meta-llama/Meta-Llama-3.1-405B", 126, 128, 8, "-tp 8 --quantization inc --kv-cache-dtype fp8_inc"),
    ("mistralai/Mixtral-8x7B-Instruct-v0.1", 32, 32, 8, "-tp 2"),
    ("Qwen/Qwen2.5-72B-Instruct", 80, 64, 8, "--tensor_parallel_size=8 -q inc"),
    ("Qwen/Qwen3-30B-A3B", 48, 32, 4, "-tp 8 --enable-expert-parallel"),
    ("Qwen/Qwen3-32B", 64, 64, 8, "-tp 8 --enable-lora --max-loras 2"),
    ("meta-llama/Llama-3.3-70B", 80, 64, 8, "-tp 4 -pp 2"),
)
"""From the validated configurations in README_GAUDI.md of v0.9.0.1+Gaudi-1.22.0; 24 of its 32 rows have several devices."""


@pytest.mark.parametrize(("model", "layers", "heads", "kv_heads", "flags"), VALIDATED)
@pytest.mark.parametrize("version", [NEWEST, GAUDI_1_22])
def test_validated_configurations_are_enumerated(
    model: str, layers: int, heads: int, kv_heads: int, flags: str, version: str
) -> None:
    config = {
        **LLAMA,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 14336,
    }
    found = spec(f"{flags} --max-num-seqs 8 --max-model-len 4096", version=version, config=config)
    manifest = Manifest.of(found)

    size = found.parallel.tensor_parallel_size
    assert size > 1
    assert found.parallel.kv_heads_of_rank(kv_heads) == max(1, kv_heads // size)
    assert manifest.of_kind("prompt")
    assert manifest.of_kind("decode")
    assert loads(dumps(manifest)) == manifest
    one = Manifest.of(spec("--max-num-seqs 8 --max-model-len 4096", version=version, config=config))
    assert (manifest.entries, manifest.id != one.id) == (one.entries, True)
    assert kv_cache_bytes(found) < kv_cache_bytes(one.spec)


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        ("-tp 3", "--tensor-parallel-size"),
        ("-tp 0", "--tensor-parallel-size"),
        ("-pp 33", "--pipeline-parallel-size"),
        ("-pp x", "--pipeline-parallel-size"),
        ("--enable-lora --max-lora-rank 24", "--max-lora-rank"),
        ("--enable-lora --max-loras 0", "--max-loras"),
        ("--enable-lora --lora-dtype int8", "--lora-dtype"),
        ("--kv-cache-dtype int4", "--kv-cache-dtype"),
    ],
)
def test_mistakes_in_devices_adapters_and_quantization_name_the_flag(flags: str, where: str) -> None:
    assert mistake(flags).where == where


@given(
    st.sampled_from(get_args(VersionName)),
    st.integers(1, 300),
    st.integers(128, 9000),
    st.integers(2, 8192),
    st.booleans(),
    st.sampled_from(["0", "1", None]),
)
def test_legal_numbers_make_a_spec_that_says_them(
    version: str, seqs: int, tokens: int, length: int, eager: bool, lazy: str | None
) -> None:
    environment = {} if lazy is None else {"PT_HPU_LAZY_MODE": lazy}
    seqs = min(seqs, tokens)
    flags = f"--max-num-seqs {seqs} --max-num-batched-tokens {tokens} --max-model-len {length}"
    flags += " --enable-chunked-prefill" + (" --enforce-eager" if eager else "")
    found = spec(flags, version=version, **environment)

    limits = found.limits
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len) == (
        seqs,
        tokens,
        length,
    )
    assert found.bucketing.version == version
    assert (found.target.execution_mode in ("lazy", "eager")) is eager


@pytest.mark.parametrize("flags", ["", "--max-model-len 2048"])
def test_a_model_without_attention_is_told_that_it_is_not_supported(flags: str) -> None:
    config = {"model_type": "mamba", "state_size": 16, "hidden_size": 768, "num_hidden_layers": 24}

    error = mistake(flags, config=config)

    assert error.where == "the model's config.json: model_type"
    assert "keys and values of attention: not supported" in error.problem


def test_the_newest_release_is_the_first_of_the_known_versions_that_is_one() -> None:
    assert next(name for name in get_args(VersionName) if "@v" in name) == NEWEST_RELEASE
