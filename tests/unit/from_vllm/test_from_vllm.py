from __future__ import annotations

from operator import attrgetter
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


FREE = {"pin": Pin(free_bytes=int(79.22 * 2**30))}
UNPINNED = {"pin": Pin()}
OF_1_22 = {"version": GAUDI_1_22}
OF_0_10 = {"version": "vllm-gaudi@v0.10.1"}
OF_0_17 = {"version": "vllm-gaudi@v0.17.1"}
OF_0_20 = {"version": "vllm-gaudi@v0.20.0rc0"}
OF_0_14 = {"version": "vllm-gaudi@v0.14.1"}
OF_1_21 = {"version": "vllm-hpu-extension@2b4ba56"}
PAD = {"VLLM_BUCKETING_STRATEGY": "pad"}
CONTIGUOUS = {"VLLM_CONTIGUOUS_PA": "1"}
HALF = {"config": {**LLAMA, "torch_dtype": "float16"}}
SLIDING = {**LLAMA, "sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]}
YARN = {
    "config": {
        **LLAMA,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
    }
}
IMAGES = {"config": {**LLAMA, "vision_config": {}}}
LATENT = {"config": {**LLAMA, "model_type": "deepseek_v2", "kv_lora_rank": 512}}
HYBRID = {"config": {**LLAMA, "layer_types": ["linear_attention", "full_attention"] * 16}}
BAMBA = {"config": {**LLAMA, "model_type": "bamba", "attn_layer_indices": [1]}}
BOTH_WAYS = {
    "config": {**LLAMA, "model_type": "gemma4", "vision_config": {}, "use_bidirectional_attention": "vision"}
}
LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 2.0}
DRAFTS = "--speculative-config.num_speculative_tokens 7 --speculative-config.method"
NO_LENGTH = {"config": {name: value for name, value in LLAMA.items() if "position" not in name}}
LONG = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}

SPECS: list[tuple[str, str, dict[str, Any], str, Any]] = [
    ("scheduler", "", {}, "engine", "vllm"),
    # A batch is never larger than its tokens; without chunked prefill a whole prompt fits a step.
    ("limits", "--max-num-batched-tokens 128", {}, "max_num_seqs", 128),
    ("limits", "--max-num-seqs 4 --max-model-len 256", {}, "max_num_batched_tokens", 1024),
    ("limits", "--no-enable-chunked-prefill", {}, "max_num_batched_tokens", 8192),
    ("limits", "", OF_1_22, "max_num_batched_tokens", 8192),
    ("limits", "--enable-chunked-prefill", OF_1_22, "max_num_batched_tokens", 2048),
    # The sizes of a step, by release of vLLM. (test_vllm_steps.py compares many more with vLLM itself.)
    ("limits", "--max-num-seqs 4 --max-model-len 256", OF_0_10, "max_num_batched_tokens", 2048),
    ("limits", "--max-num-seqs 4 --max-model-len 256", OF_1_22, "max_num_batched_tokens", 1024),
    ("limits", "--max-num-seqs 4 --max-model-len 256", OF_1_21, "max_num_batched_tokens", 2048),
    ("limits", "--no-enable-chunked-prefill", OF_0_10, "max_num_batched_tokens", 2048),
    ("limits", "--max-model-len 2048", {**OF_1_22, **IMAGES}, "max_num_batched_tokens", 5120),
    ("limits", "--max-model-len 2048", {**OF_0_10, **IMAGES}, "max_num_batched_tokens", 2048),
    ("limits", "--max-num-batched-tokens 16384", {**OF_1_22, **LATENT}, "max_num_batched_tokens", 8192),
    ("limits", "--max-num-batched-tokens 16384", {**OF_1_21, **LATENT}, "max_num_batched_tokens", 16384),
    ("limits", "--max-num-batched-tokens 16384", LATENT, "max_num_batched_tokens", 16384),
    ("limits", "", BOTH_WAYS, "max_num_batched_tokens", 2496),
    ("limits", "--max-num-batched-tokens 4096", BOTH_WAYS, "max_num_batched_tokens", 4096),
    ("limits", "", {**BOTH_WAYS, "version": "vllm-gaudi@v0.21.0"}, "max_num_batched_tokens", 2048),
    ("limits", "--limit-mm-per-prompt.video.num_frames 30", BOTH_WAYS, "max_num_batched_tokens", 2340),
    ("limits", "--performance-mode throughput", {}, "max_num_batched_tokens", 4096),
    ("limits", "--performance-mode throughput", {}, "max_num_seqs", 512),
    ("limits", "--performance-mode throughput --max-num-seqs 2 --max-model-len 1024", {}, "max_num_seqs", 2),
    ("bucketing", "", HYBRID, "prefix_caching", False),
    ("bucketing", "--enable-prefix-caching", HYBRID, "prefix_caching", True),
    ("bucketing", "--enable-prefix-caching", {**HYBRID, **OF_0_14}, "prefix_caching", False),
    ("bucketing", "--enable-prefix-caching", {**BAMBA, **OF_0_14}, "prefix_caching", True),
    ("bucketing", "", {**BAMBA, **OF_0_14}, "prefix_caching", False),
    ("bucketing", "", {**HYBRID, **OF_0_10}, "prefix_caching", True),
    ("bucketing", "--enable-prefix-caching", {**IMAGES, **OF_1_22}, "prefix_caching", False),
    # Prompts of a step, by version.
    ("limits", "", {"VLLM_PROMPT_BS_BUCKET_MAX": "4"}, "max_num_prefill_seqs", 4),
    ("limits", "--max-num-seqs 2", {"VLLM_PROMPT_BS_BUCKET_MAX": "4"}, "max_num_prefill_seqs", 4),
    ("limits", "--max-num-seqs 8", {"VLLM_MERGED_PREFILL": "1"}, "max_num_prefill_seqs", 8),
    ("limits", "--max-num-seqs 8", OF_1_22, "max_num_prefill_seqs", 8),
    ("limits", "--max-num-prefill-seqs 2", OF_1_22, "max_num_prefill_seqs", 2),
    ("limits", "--max-num-prefill-seqs 2", {}, "max_num_prefill_seqs", 1),
    ("limits", "", {**OF_0_10, "VLLM_PROMPT_BS_BUCKET_MAX": "1"}, "max_num_prefill_seqs", 1),
    ("limits", "", {**OF_0_10, "VLLM_MERGED_PREFILL": "1"}, "max_num_prefill_seqs", 1),
    # Blocks: pinned by the option, then by the command, then by free memory and upstream's formula.
    ("limits", "--num-gpu-blocks-override 5000", {}, "num_blocks", 4096),
    ("limits", "--num-gpu-blocks-override 5000", UNPINNED, "num_blocks", 5000),
    ("limits", "--num-gpu-blocks-override 5000", {"pin": Pin(free_bytes=1)}, "num_blocks", 5000),
    ("limits", "", FREE, "num_blocks", 4105),
    ("limits", "--gpu-memory-utilization 0.5", FREE, "num_blocks", 2280),
    ("limits", "", {**FREE, "VLLM_GRAPH_RESERVED_MEM": "0.4"}, "num_blocks", 2736),
    ("limits", "--enforce-eager", {**FREE, "VLLM_GRAPH_RESERVED_MEM": "0.4"}, "num_blocks", 4562),
    ("limits", "", {**FREE, **OF_1_22}, "num_blocks", 4106),
    ("limits", "--kv-cache-dtype fp8_inc", FREE, "num_blocks", 8212),
    ("limits", "-tp 8", FREE, "num_blocks", 32853),
    ("limits", "-tp 16", FREE, "num_blocks", 32853),
    ("limits", "-pp 2", FREE, "num_blocks", 8212),
    ("limits", "-pp 2", {**FREE, **OF_1_22}, "num_blocks", 4106),
    # The extension divides the blocks among the stages of a pipeline.
    ("limits", "-pp 2 --num-gpu-blocks-override 5000", {**UNPINNED, **OF_1_22}, "num_blocks", 2500),
    ("limits", "-pp 2 --num-gpu-blocks-override 5000", UNPINNED, "num_blocks", 5000),
    ("limits", "-pp 2", OF_1_22, "num_blocks", 4096),
    # vLLM keeps one block for itself.
    ("limits", "--max-model-len 300 --max-num-seqs 2", {"pin": Pin(num_blocks=4)}, "num_blocks", 4),
    (
        "limits",
        "--max-model-len 300 --max-num-seqs 2",
        {**OF_1_22, "pin": Pin(num_blocks=3)},
        "num_blocks",
        3,
    ),
    # Lengths.
    ("limits", "--max-model-len 8192", LONG, "allow_long_max_model_len", False),
    ("limits", "--max-model-len 10000", LONG, "allow_long_max_model_len", True),
    ("limits", "--max-model-len 10000", {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "True "}, "max_model_len", 10000),
    ("limits", "", YARN, "max_model_len", 32768),
    ("limits", "", YARN, "allow_long_max_model_len", True),
    ("limits", "--max-model-len 32768", YARN, "max_model_len", 32768),
    ("limits", "--max-model-len 32769", {**YARN, **LONG}, "max_model_len", 32769),
    ("limits", "--max-model-len 4096", NO_LENGTH, "max_model_len", 4096),
    # The model: Gaudi serves bfloat16, the extension float32, too.
    ("model", "", HALF, "dtype", "bfloat16"),
    ("model", "--dtype half", {}, "dtype", "bfloat16"),
    ("model", "--dtype auto", {"config": {**LLAMA, "torch_dtype": None}}, "dtype", "bfloat16"),
    ("model", "--dtype float32", OF_1_22, "dtype", "float32"),
    ("model", "-q awq_hpu", {}, "quantization", QuantizationSpec(method="awq_hpu")),
    ("model", "-q None", {}, "quantization", None),
    ("model", "--kv-cache-dtype auto", {}, "quantization", None),
    ("model", "--kv-cache-dtype bfloat16", {}, "quantization", None),
    # The defragmenter.
    ("defrag", "", {}, "enabled", False),
    ("defrag", "", CONTIGUOUS, "enabled", True),
    ("defrag", "", {**CONTIGUOUS, "VLLM_DEFRAG": "0"}, "enabled", False),
    ("defrag", "", {"VLLM_DEFRAG": "1"}, "enabled", True),
    ("defrag", "", {**OF_0_20, **CONTIGUOUS}, "enabled", False),
    ("defrag", "", {**OF_0_20, "VLLM_DEFRAG": "1"}, "enabled", True),
    ("defrag", "", {**OF_0_17, **CONTIGUOUS}, "enabled", False),
    ("defrag", "", {**OF_0_17, "VLLM_UNIFIED_ATTN": "1"}, "enabled", True),
    ("defrag", "", {**OF_0_10, "VLLM_DEFRAG": "1"}, "enabled", False),
    ("defrag", "", {**OF_1_22, "VLLM_DEFRAG": "1"}, "enabled", False),
    ("defrag", "", {"version": "vllm-hpu-extension@7717587", "VLLM_DEFRAG": "1"}, "enabled", True),
    ("defrag", "", {"PT_HPU_LAZY_MODE": "0"}, "with_graphs", True),
    ("defrag", "", {"PT_HPU_LAZY_MODE": "1"}, "with_graphs", False),
    ("defrag", "", {"PT_HPU_LAZY_MODE": "1", "VLLM_DEFRAG_WITH_GRAPHS": "yes"}, "with_graphs", True),
    ("defrag", "", {}, "threshold", 32),
    ("defrag", "", {"VLLM_DEFRAG_THRESHOLD": "8"}, "threshold", 8),
    # The smallest batch of the sampler.
    ("sampler", "", {}, "smallest_batch_size", 1),
    ("sampler", "", {"version": "vllm-gaudi@v0.16.0"}, "smallest_batch_size", 1),
    ("sampler", "", {"version": "vllm-gaudi@v0.14.1"}, "smallest_batch_size", 0),
    ("sampler", "", {"version": "vllm-gaudi@v0.11.2"}, "smallest_batch_size", 0),
    # Buckets.
    ("bucketing", "", PAD, "strategy", "padding_aware"),
    ("bucketing", "", CONTIGUOUS, "prefix_caching", False),
    (
        "bucketing",
        "",
        {**PAD, "VLLM_DECODE_BS_BUCKET_PAD_MAX": "16"},
        "decode.batch_size",
        AxisBounds(pad_max=16),
    ),
    ("bucketing", "", {"PT_HPU_SDPA_QKV_SLICE_MODE_FWD": "1"}, "sliding", SlidingSpec()),
    ("bucketing", "", {"VLLM_BUCKETING_FROM_FILE": "b.txt"}, "strategy", "file"),
    ("bucketing", "", {"VLLM_BUCKETING_FROM_FILE": "b.txt"}, "file_text", "# b.txt"),
    ("bucketing", "", {}, "skip_decode_block_clamp", False),
    ("bucketing", "", {"config": SLIDING}, "skip_decode_block_clamp", True),
    ("bucketing", "", {}, "num_speculative_tokens", 0),
    ("bucketing", "--speculative-config.num_speculative_tokens 2", {}, "num_speculative_tokens", 2),
    ("bucketing", "--num-speculative-tokens 4", {}, "num_speculative_tokens", 4),
    # Without its slices of attention, pad takes few tokens.
    (
        "bucketing",
        "--max-num-batched-tokens 512 --max-num-seqs 8",
        {**OF_0_20, **PAD},
        "strategy",
        "padding_aware",
    ),
    # The scheduler.
    ("scheduler", "--no-enable-chunked-prefill", {}, "chunked_prefill", False),
    ("scheduler", "--no-enable-chunked-prefill", OF_0_10, "chunked_prefill", True),
    ("scheduler", "--enable-chunked-prefill", {**OF_1_22, **LATENT}, "chunked_prefill", False),
    ("limits", "--max-num-batched-tokens 16384", {**OF_0_10, **LATENT}, "max_num_batched_tokens", 16384),
    ("scheduler", "", OF_1_22, "chunked_prefill", False),
    ("scheduler", "--enable-chunked-prefill", OF_1_22, "chunked_prefill", True),
    ("scheduler", "--max-logprobs 3", {}, "max_logprobs", 3),
    ("scheduler", "--max-logprobs=-1", {}, "max_logprobs", -1),
    ("scheduler", "", {"VLLM_T_COMPILE_DYNAMIC_SHAPES": "0"}, "static_shapes", True),
    # Vision.
    ("vision", "", {"VLLM_MULTIMODAL_BUCKETS": "1600,4096"}, "buckets", (1600, 4096)),
    ("vision", "", {"VLLM_MULTIMODAL_BUCKETS": ""}, "buckets", None),
    ("vision", "", {"VLLM_MULTIMODAL_BUCKETS": "None"}, "buckets", ()),
    ("vision", "", {"VLLM_MULTIMODAL_RESOLUTIONS": " 10x20 , 30x40x2"}, "resolutions", ("10x20", "30x40x2")),
    ("vision", "", {"VLLM_MULTIMODAL_RESOLUTIONS": ""}, "resolutions", ()),
]


@pytest.mark.parametrize(
    ("flags", "rest"),
    [
        ("--block-size 48", {}),
        ("--block-size 256", OF_0_17),
        ("-pp 2 --async-scheduling", {}),
        ("--async-scheduling", {}),
        (f"{DRAFTS} eagle --async-scheduling", {}),
        (f"{DRAFTS} '[1]' --async-scheduling", {}),
        ("--hf-overrides.layer_types '[[1]]'", {}),
        (f"{DRAFTS} ngram --no-async-scheduling", {}),
        (f"{DRAFTS} ngram --enable-lora --max-num-batched-tokens 2048", {}),
        (f"{DRAFTS} ngram --enable-lora --max-num-batched-tokens 1024", OF_0_10),
        ("--max-num-partial-prefills 2 --enable-chunked-prefill", OF_1_22),
        ("--max-num-partial-prefills 1", {}),
        ("--performance-mode balanced --limit-mm-per-prompt image=2", {}),
        ("--limit-mm-per-prompt image=2", BOTH_WAYS),
        ("--long-prefill-token-threshold 8192", {}),
        ("--long-prefill-token-threshold 9000", {"version": "vllm-gaudi@v0.26.0"}),
    ],
)
def test_what_vllm_takes_is_taken(flags: str, rest: dict[str, Any]) -> None:
    assert spec(flags, **rest).scheduler.engine == "vllm"


def test_what_a_command_an_environment_and_a_version_make() -> None:
    wrong = []
    for table, flags, rest, name, expected in SPECS:
        found = attrgetter(f"{table}.{name}")(spec(flags, **rest))
        if found != expected:
            wrong.append((flags, rest, f"{table}.{name}", found))

    assert wrong == []


NOTES: list[tuple[str, dict[str, Any], str, bool]] = [
    ("", FREE, "add --num-gpu-blocks-override 4105 to the vLLM command", True),
    ("", {}, "add --num-gpu-blocks-override 4096", True),
    ("--num-gpu-blocks-override 4096", {}, "add", False),
    ("--gpu-memory-utilization 0.8", {}, "no effect, as the number of KV blocks is given", True),
    (
        "-pp 2",
        OF_1_22,
        "8192 KV blocks, from --num-blocks\n2 schedulers, one for each stage, have 4096",
        True,
    ),
    ("-pp 2", OF_1_22, "add --num-gpu-blocks-override 8192", True),
    ("", HALF, "Gaudi serves bfloat16", True),
    ("--dtype half", {}, "Gaudi serves bfloat16", True),
    ("--dtype bfloat16", HALF, "Gaudi serves bfloat16", False),
    ("", {}, "Gaudi serves bfloat16", False),
    ("", OF_0_10, "vllm-gaudi@v0.10.1 warms up no sampler", True),
    ("", {"VLLM_SKIP_WARMUP": "true"}, "VLLM_SKIP_WARMUP", True),
    ("", {"VLLM_SKIP_WARMUP": "false"}, "VLLM_SKIP_WARMUP", False),
    ("", {"config": {**LLAMA, "quantization_config": {}}}, "quantized", True),
    ("", {}, "draft model", False),
    ("--num-speculative-tokens 4", {}, "draft model", True),
    ("--max-model-len 10000", LONG, "more than the model's 8192 positions", True),
    ("--max-model-len 8192", LONG, "VLLM_ALLOW_LONG_MAX_MODEL_LEN", False),
    ("--max-model-len 4096", NO_LENGTH, "does not check that the model supports --max-model-len 4096", True),
    ("--max-model-len 20000", YARN, "at most original_max_position_embeddings", True),
    ("", BOTH_WAYS, "max_num_batched_tokens 2,496: an image or a video takes as many", True),
    ("", {}, "max_num_batched_tokens", False),
    ("", {**OF_1_22, **LATENT}, "max_num_batched_tokens", False),
    ("--max-num-batched-tokens 16K", {**OF_1_22, **LATENT}, "max_num_batched_tokens 8,192: what the", True),
    (
        "",
        {**YARN, "version": "vllm-gaudi@v0.24.0"},
        "max_model_len 32,768: original_max_position_embeddings 8,192 x factor 4 (yarn), as vLLM 0.24.0",
        True,
    ),
    (
        "",
        {"version": "vllm-gaudi@v0.24.0"},
        "max_model_len 8,192: max_position_embeddings 8,192, as vLLM 0.24.0",
        True,
    ),
]


def test_what_the_user_is_told() -> None:
    wrong = [row for row in NOTES if (row[2] in notes(row[0], **row[1])) is not row[3]]

    assert wrong == []


@pytest.mark.parametrize(
    ("flags", "environment", "where"),
    [
        ("--max-num-seqs 200 --max-num-batched-tokens 129", {}, "--max-num-seqs"),
        ("--max-num-seqs 4096", {}, "--max-num-seqs"),
        ("--block-size 48", OF_0_17, "--block-size"),
        ("--dtype bf16", {}, "--dtype"),
        ("-tp 2 --enable-expert-parallel", {}, "--enable-expert-parallel"),
        ("--enable-expert-parallel", OF_1_22, "--enable-expert-parallel"),
        ("--block-size 256", OF_0_10, "--block-size"),
        ("--performance-mode throughput", {"version": "vllm-gaudi@v0.16.0"}, "--performance-mode"),
        ("--performance-mode fast", {}, "--performance-mode"),
        (f"{DRAFTS} ngram --async-scheduling", {}, "--async-scheduling"),
        (f"{DRAFTS} eagle --async-scheduling", OF_0_10, "--async-scheduling"),
        ("-pp 2 --async-scheduling", OF_0_14, "--async-scheduling"),
        (f"{DRAFTS} ngram --enable-lora --max-num-batched-tokens 2047", {}, "--max-num-batched-tokens"),
        ("--max-num-partial-prefills 2", {}, "--max-num-partial-prefills"),
        ("--max-long-partial-prefills 2", OF_0_10, "--max-long-partial-prefills"),
        ("--long-prefill-token-threshold 8193", {}, "--long-prefill-token-threshold"),
        ("--hf-overrides.max_position_embeddings Infinity", {}, "--max-model-len"),
        ("", {"config": {**LLAMA, "rope_scaling": LINEAR | {"factor": 1e308}}}, "the number of KV blocks"),
        (
            "",
            {"config": {**LLAMA, "rope_scaling": LINEAR | {"type": ["x"]}}},
            "the model's config.json: rope_scaling",
        ),
        ("", {"config": {**LLAMA, "model_type": ["x"]}}, "the model's config.json: model_type"),
        ("", {"pin": Pin(num_blocks=64)}, "the number of KV blocks"),
        ("--max-num-seqs 2 --max-num-prefill-seqs 4", {"version": GAUDI_1_22}, "--max-num-prefill-seqs"),
        ("--max-model-len 10000", {}, "--max-model-len"),
        ("--max-model-len 1", {}, "--max-model-len"),
        ("--max-model-len auto", {}, "--max-model-len"),
        ("--max-num-batched-tokens 64", {}, "--max-num-batched-tokens"),
        ("--num-gpu-blocks-override 3", {"pin": Pin()}, "the number of KV blocks"),
        ("--num-gpu-blocks-override 0", {"pin": Pin()}, "--num-gpu-blocks-override"),
        ("--served-model-name ''", {}, "--served-model-name"),
        ("", NO_LENGTH, "--max-model-len"),
        ("", {"config": {**LLAMA, "max_position_embeddings": None}}, "--max-model-len"),
        ("", {"pin": Pin(free_bytes=10)}, "--free-memory"),
        ("--max-logprobs many", {}, "--max-logprobs"),
        ("", {**OF_0_17, "VLLM_UNIFIED_ATTN": "1", "VLLM_MERGED_PREFILL": "0"}, "VLLM_MERGED_PREFILL"),
        ("-tp 3", {}, "--tensor-parallel-size"),
        ("-tp 0", {}, "--tensor-parallel-size"),
        ("-pp 33", {}, "--pipeline-parallel-size"),
        ("-pp x", {}, "--pipeline-parallel-size"),
        ("--enable-lora --max-lora-rank 24", {}, "--max-lora-rank"),
        ("--enable-lora --max-loras 0", {}, "--max-loras"),
        ("--enable-lora --lora-dtype int8", {}, "--lora-dtype"),
        ("--kv-cache-dtype int4", {}, "--kv-cache-dtype"),
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


def test_blocks_that_are_pinned_nowhere_are_refused_with_the_ways_to_pin_them() -> None:
    error = mistake(pin=Pin())

    assert error.where == "the number of KV blocks"
    for way in ("--num-gpu-blocks-override N", "--num-blocks N", "--free-memory 92GiB"):
        assert way in error.remedy


def test_versions_without_a_defragmenter_ignore_its_variables() -> None:
    _, report = read(version="vllm-gaudi@v0.10.1", VLLM_DEFRAG="1")

    assert [(one.name, one.reason) for one in report.ignored] == [
        ("VLLM_DEFRAG", "vllm-gaudi@v0.10.1 has no defragmenter")
    ]


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


def test_other_variables_are_sorted_by_whether_they_change_code() -> None:
    _, report = read(
        "--port 1", VLLM_PROMPT_USE_FUSEDSDPA="1", PT_HPU_WEIGHT_SHARING="0", VLLM_API_KEY="secret", HOME="/x"
    )

    assert [one.name for one in report.unknown] == ["PT_HPU_WEIGHT_SHARING", "VLLM_PROMPT_USE_FUSEDSDPA"]
    assert [one.name for one in report.harmless] == ["--port", "VLLM_API_KEY"]
    assert not any("secret" in line for line in report.lines())


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
    plain = spec()

    assert set(plain.scheduler.model_dump()) == {"engine", "chunked_prefill"}
    assert spec(VLLM_T_COMPILE_DYNAMIC_SHAPES="true") == plain
    compiled = {"PT_HPU_LAZY_MODE": "0"}
    dynamic = "graphs of shapes that are traced as dynamic ones"
    assert any(text.startswith(dynamic) for text in left_out(spec(**compiled)))
    static = left_out(spec(**compiled, VLLM_T_COMPILE_DYNAMIC_SHAPES="false"))
    assert static == left_out(spec(**compiled), is_static=True)
    assert not any(text.startswith(dynamic) for text in static)


def test_a_whole_prompt_must_fit_a_step_without_chunked_prefill() -> None:
    error = mistake("--no-enable-chunked-prefill --max-num-batched-tokens 4096")

    assert (error.where, "at least max_model_len" in error.remedy) == ("--max-num-batched-tokens", True)


@pytest.mark.parametrize("value", ["0", "yes"])
def test_a_length_beyond_the_models_positions_needs_permission(value: str) -> None:
    error = mistake("--max-model-len 10000", VLLM_ALLOW_LONG_MAX_MODEL_LEN=value)

    assert (error.where, "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1" in error.remedy) == ("--max-model-len", True)
    assert "x factor 4 (yarn), as vLLM 0.27.1" in mistake("--max-model-len 32769", **YARN).problem


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


def test_vllm_keeps_one_block_for_itself() -> None:
    assert "null block" in mistake("--max-model-len 300 --max-num-seqs 2", pin=Pin(num_blocks=3)).problem


def test_the_quantization_that_a_command_asks_for() -> None:
    found = spec("--quantization inc --kv-cache-dtype fp8_inc", QUANT_CONFIG="/q/maxabs_quant_g3.json")

    assert found.model.quantization == QuantizationSpec(
        method="inc", kv_cache_dtype="fp8_inc", config_sha256=sha256_bytes(b"/q/maxabs_quant_g3.json")
    )
    assert spec().model.quantization is None


def test_quant_config_alone_turns_quantization_on() -> None:
    found, report = read(QUANT_CONFIG="q.json")

    assert found.model.quantization == QuantizationSpec(method="inc", config_sha256=sha256_bytes(b"q.json"))
    assert any("QUANT_CONFIG alone turns on quantization" in note for note in report.notes)
    assert found.model.signature() != spec().model.signature()


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
        **({"num_experts": 128} if "A3B" in model else {}),
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
