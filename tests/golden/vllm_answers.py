"""Asks vLLM itself about servers on Gaudi, how long sequences may be and how large steps are, and prints golden tables.

Run it with the interpreter of an environment that has vLLM, and save what it prints as ``data/vllm-WHAT/RELEASE.json``;
`test_vllm_lengths` and `test_vllm_steps` compare our rules with every such file::

    VLLM_PLUGINS= PYTHON tests/golden/vllm_answers.py lengths > tests/golden/data/vllm-lengths/0.32.0.json
    VLLM_PLUGINS= PYTHON tests/golden/vllm_answers.py steps > tests/golden/data/vllm-steps/0.32.0.json

**Lengths** are asked of a model's config. For a release that cannot run here, ``lengths --sources DIR`` takes the folder
``vllm`` of its wheel: the functions that derive the length are taken out of its files and called with the transformers of
PYTHON, which must be one that the release allows.

**Steps** are asked of commands: each is read by vLLM's own parser, and its own ``AsyncEngineArgs.create_engine_config``
makes the config of an API server. Only the platform is replaced, by one that says and does what ``HpuPlatform`` of
vllm_gaudi/platform.py does about these values. ``steps --platform FILE`` takes that class itself from a copy of the file:
the answers must be the same. A release that has no environment here can be asked with the packages of another one: let
PYTHONPATH begin with the folder of its unpacked wheel, and of a transformers that it allows. Up to 0.13 its platform asks
more than ours says: give the file.
"""

from __future__ import annotations

import ast
import contextlib
import json
import logging
import os
import shlex
import sys
import tempfile
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "vocab_size": 1000,
    "rope_theta": 10000.0,
    "dtype": "bfloat16",
}
_FACTORS = [1.0] * 8


def _rope(type_name: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": type_name, **parameters}}


@contextlib.contextmanager
def directories(configs: Mapping[str, Any]) -> Iterator[Path]:
    """Yields a folder that has a model's directory for each config."""
    with tempfile.TemporaryDirectory() as folder:
        for name, config in configs.items():
            (Path(folder) / name).mkdir()
            (Path(folder) / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield Path(folder)


def print_table(rows: Iterable[tuple[str, Any]]) -> None:
    """Prints a golden table. What vLLM prints while it is asked goes to standard error."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    output = os.dup(1)
    os.dup2(2, 1)  # Old releases log to the output.
    lines = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows]
    with os.fdopen(output, "w", encoding="utf-8") as stream:
        stream.write("{\n" + ",\n".join(lines) + "\n}\n")


# Lengths

LENGTHS = (4096, 8192, 32768, 65536, 131072, 131073)
"""Values of --max-model-len that are tried."""

_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")
_LONG = {"short_factor": _FACTORS, "long_factor": _FACTORS}
_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "linear": _rope("linear", factor=4.0),
    "linear, whole factor": _rope("linear", factor=2),
    "linear, broken factor": _rope("linear", factor=2.5),
    "linear, old key": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear, both keys": {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 4.0}},
    "keys that differ": {"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 4.0}},
    "dynamic": _rope("dynamic", factor=2.0),
    "yarn": _rope("yarn", factor=4.0, original_max_position_embeddings=32768),
    "yarn, scaled": _rope("yarn", factor=8.0, original_max_position_embeddings=4096),
    "yarn, old key": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
    "yarn, original outside": {**_rope("yarn", factor=2.0), "original_max_position_embeddings": 16384},
    "yarn, original in both": {
        **_rope("yarn", factor=2.0, original_max_position_embeddings=4096),
        "original_max_position_embeddings": 16384,
    },
    "yarn, no original": _rope("yarn", factor=4.0),
    "deepseek_yarn": _rope("deepseek_yarn", factor=2.0, original_max_position_embeddings=4096),
    "llama3": _rope("llama3", **_LLAMA3),
    "longrope": _rope("longrope", **_LONG, original_max_position_embeddings=4096),
    "longrope, original outside": {**_rope("longrope", **_LONG), "original_max_position_embeddings": 4096},
    "longrope, factor": {**_rope("longrope", **_LONG, factor=8.0), "original_max_position_embeddings": 4096},
    "su": {"rope_scaling": {"type": "su", **_LONG}, "original_max_position_embeddings": 4096},
    "phi3, longrope": {"model_type": "phi3", "rope_scaling": {"type": "longrope", **_LONG}},
    "phi3, plain": {"model_type": "phi3"},
    "mrope": {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
    "default": _rope("default"),
    "default, factor": _rope("default", factor=4.0),
    "null": {"rope_scaling": None},
    "no type": {"rope_scaling": {"factor": 4.0}},
    "linear, no factor": _rope("linear"),
    "linear, null factor": _rope("linear", factor=None),
    "yarn, no factor": _rope("yarn", original_max_position_embeddings=4096),
    "llama3, no factor": _rope("llama3", original_max_position_embeddings=4096),
    "longrope, no lists": _rope("longrope", original_max_position_embeddings=4096),
    "rope_parameters": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "both names": {
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    },
    "nested": {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 512,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "nested yarn": {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 512,
        "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0,
                               "original_max_position_embeddings": 8192},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "gemma3_text": {"model_type": "gemma3_text", **_rope("linear", factor=8.0), "head_dim": 16},
    "model_max_length above": {"max_position_embeddings": 8192, "model_max_length": 131072},
    "model_max_length below": {"model_max_length": 8192},
    "model_max_length, scaled": {"model_max_length": 8192, **_rope("linear", factor=4.0)},
    "model_max_length null": {"model_max_length": None},
    "max_seq_len": {"max_seq_len": 8192},
    "seq_length": {"seq_length": 65536},
    "n_positions": {"n_positions": 4096},
    "sliding window": {"model_type": "mistral", "sliding_window": 4096},
    "sliding window 0": {"model_type": "mistral", "sliding_window": 0},
    "window switched off": {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096},
    "gpt2": {"model_type": "gpt2", "n_positions": 8192, "n_embd": 64, "n_head": 4, "n_layer": 2},
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {name: {**_LLAMA, **change} for name, change in _CHANGES.items()}
del CONFIGS["gpt2"]["max_position_embeddings"]


def lengths_of(name: str, ask: Any) -> dict[str, Any]:
    """Returns the length that is served by default, None if vLLM does not start, and the lengths that are taken."""
    outcomes = []
    for length in (None, *LENGTHS):
        try:
            outcomes.append(int(ask(name, length)))
        except Exception as error:  # Whatever it is, the server does not start.
            print(name, length, type(error).__name__, str(error)[:120].replace("\n", " "), file=sys.stderr)
            outcomes.append(None)
    taken = [length for length, served in zip(LENGTHS, outcomes[1:], strict=True) if served is not None]
    return {"default": outcomes[0], "taken": taken}


def lengths(sources: Path | None) -> Iterator[tuple[str, Any]]:
    """Yields the lengths of each config."""
    with directories(CONFIGS) as root:
        ask = _of_model_config(root) if sources is None else _of_sources(root, sources)
        yield from ((name, lengths_of(name, ask)) for name in CONFIGS)


def _of_model_config(root: Path) -> Any:
    from vllm.config import ModelConfig

    def ask(name: str, length: int | None) -> int:
        path = str(root / name)
        config = ModelConfig(
            model=path, tokenizer=path, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=length
        )
        return config.max_model_len

    return ask


def _of_sources(root: Path, sources: Path) -> Any:
    from transformers import AutoConfig, PretrainedConfig

    names = ("_get_and_verify_max_len", "patch_rope_scaling", "patch_rope_scaling_dict", "patch_rope_parameters",
             "patch_rope_parameters_dict", "is_rope_parameters_nested", "getattr_iter", "derive_max_model_len_and_key",
             "patch_legacy_rope_type")  # fmt: skip
    found: dict[str, Any] = {
        "Any": Any, "PretrainedConfig": PretrainedConfig, "logger": logging.getLogger("vllm"), "Version": _version,
        "version": lambda name: __import__(name).__version__, "Optional": types.SimpleNamespace, "Union": None,
        "envs": types.SimpleNamespace(VLLM_ALLOW_LONG_MAX_MODEL_LEN=False),
        "current_platform": types.SimpleNamespace(check_max_model_len=lambda length: length, is_tpu=lambda: False),
        **dict.fromkeys(("ALLOWED_LAYER_TYPES", "ALLOWED_ATTENTION_LAYER_TYPES"), _LAYER_TYPES),
    }  # fmt: skip
    found["logger"].warning_once = found["logger"].info_once = lambda *_args, **_rest: None
    for path in ("config.py", "config/__init__.py", "config/model.py", "config/utils.py", "transformers_utils/config.py",
                 "transformers_utils/model_arch_config_convertor.py"):  # fmt: skip
        if (sources / path).exists():
            for node in ast.walk(ast.parse((sources / path).read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef) and node.name in names and node.name not in found:
                    module = ast.Module(
                        [ast.ImportFrom("__future__", [ast.alias("annotations")], 0), node], []
                    )
                    exec(compile(ast.fix_missing_locations(module), path, "exec"), found)
    sys.modules["vllm.config.utils"] = types.SimpleNamespace(getattr_iter=found.get("getattr_iter"))  # type: ignore[assignment]
    patch = found.get("patch_rope_parameters") or found["patch_rope_scaling"]
    derive = found["_get_and_verify_max_len"]

    def ask(name: str, length: int | None) -> int:
        config = AutoConfig.from_pretrained(str(root / name))
        patch(config)
        arguments = {"hf_config": config, "tokenizer_config": None, "max_model_len": length, "sliding_window": None,
                     "disable_sliding_window": False, "sliding_window_len": None}  # fmt: skip
        if "derive_max_model_len_and_key" in found:
            pair = found["derive_max_model_len_and_key"](types.SimpleNamespace(hf_text_config=config))
            arguments["model_arch_config"] = types.SimpleNamespace(derived_max_model_len_and_key=pair)
        taken = derive.__code__.co_varnames[: derive.__code__.co_argcount]
        return int(derive(**{key: value for key, value in arguments.items() if key in taken}))

    return ask


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


# Steps


def _model(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    return {**_LLAMA, "architectures": [architecture], "model_type": model_type, **changes}


_LAYERS = ["sliding_attention", "full_attention"]
_VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama, short": {**_LLAMA, "max_position_embeddings": 100},
    "llama, long": {**_LLAMA, "max_position_embeddings": 131072},
    "llama, float32": {**_LLAMA, "dtype": "float32"},
    "qwen2": _model("Qwen2ForCausalLM", "qwen2", use_sliding_window=False, sliding_window=4096),
    "qwen3": _model("Qwen3ForCausalLM", "qwen3", head_dim=16, max_position_embeddings=40960),
    "phi3": _model(
        "Phi3ForCausalLM",
        "phi3",
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_scaling={"type": "longrope", "short_factor": _FACTORS, "long_factor": _FACTORS},
        pad_token_id=0,
    ),
    "gemma3": _model(
        "Gemma3ForCausalLM", "gemma3_text", head_dim=16, sliding_window=512, layer_types=_LAYERS
    ),
    "paligemma": {
        "architectures": ["PaliGemmaForConditionalGeneration"],
        "model_type": "paligemma",
        "text_config": _model("GemmaForCausalLM", "gemma", head_dim=16, max_position_embeddings=8192),
        "vision_config": {
            **_VISION,
            "model_type": "siglip_vision_model",
            "num_image_tokens": 16,
            "projection_dim": 64,
        },
        "projection_dim": 64,
        "image_token_index": 999,
        "dtype": "bfloat16",
    },
    "idefics3": {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "text_config": {**_LLAMA, "max_position_embeddings": 16384},
        "vision_config": {**_VISION, "model_type": "idefics3_vision"},
        "image_token_id": 999,
        "dtype": "bfloat16",
    },
    "whisper": {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 128,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "num_hidden_layers": 2,
        "vocab_size": 1000,
        "pad_token_id": 0,
        "dtype": "bfloat16",
    },
    "mistral": _model("MistralForCausalLM", "mistral", sliding_window=4096),
    "mixtral": _model(
        "MixtralForCausalLM", "mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "qwen3 moe": _model(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    ),
    "yarn": {**_LLAMA, **_rope("yarn", factor=4.0, original_max_position_embeddings=32768)},
    "linear": {**_LLAMA, **_rope("linear", factor=4.0)},
    "dynamic": {**_LLAMA, **_rope("dynamic", factor=2.0)},
    "qwen3 next": _model(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        linear_conv_kernel_dim=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
    ),
    "deepseek": _model(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_shared_experts=1,
        first_k_dense_replace=1,
        num_key_value_heads=4,
    ),
}
_NGRAM = """--speculative-config '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}'"""
_WORDS: dict[str, tuple[str, ...]] = {
    "llama": (
        "--max-model-len 8k",
        "--max-model-len 8K",
        "--max-model-len 32769",
        "--max-num-seqs 16",
        "--max-num-seqs 4096",
        "--max-num-seqs 4096 --max-num-batched-tokens 8192",
        "--max-num-batched-tokens 128",
        "--max-num-batched-tokens 128 --max-num-seqs 128",
        "--max-num-batched-tokens 128 --max-num-seqs 129",
        "--max-num-batched-tokens 16k",
        "--max-num-batched-tokens 16K --max-num-seqs 1",
        "--max-num-seqs 1 --max-model-len 256",
        "--max-num-seqs 4 --max-model-len 256 --max-num-batched-tokens 2048",
        "--enable-chunked-prefill --max-num-batched-tokens 512",
        "--no-enable-chunked-prefill",
        "--no-enable-chunked-prefill --max-model-len 1024",
        "--no-enable-chunked-prefill --max-model-len 4096 --max-num-batched-tokens 4096",
        "--no-enable-chunked-prefill --max-model-len 4096 --max-num-batched-tokens 4095",
        "--no-enable-chunked-prefill --max-model-len 4096 --max-num-seqs 3000",
        "--async-scheduling",
        "--no-async-scheduling",
        "--enable-prefix-caching",
        "--no-enable-prefix-caching",
        f"{_NGRAM}",
        f"{_NGRAM} --async-scheduling",
        f"{_NGRAM} --no-async-scheduling --max-num-seqs 8",
        f"{_NGRAM} --enable-lora",
        f"{_NGRAM} --enable-lora --max-num-batched-tokens 1279",
        f"{_NGRAM} --enable-lora --max-num-batched-tokens 1280",
        f"{_NGRAM} --max-num-seqs 512 --max-num-batched-tokens 512",
        "--enable-lora --max-loras 2",
        "-tp 2",
        "-tp 2 --max-num-seqs 512",
        "-tp 3",
        "-pp 2",
        "-pp 2 --async-scheduling",
        "--dtype float16",
        "--dtype float32 --enforce-eager",
        "--enforce-eager",
        "--block-size 64",
        "--block-size 256",
        "--block-size 48",
        "--performance-mode throughput",
        "--performance-mode throughput --max-num-seqs 32",
        "--performance-mode throughput --max-num-batched-tokens 1024",
        "--performance-mode throughput --no-enable-chunked-prefill --max-model-len 3000",
        "--performance-mode interactivity",
        "--performance-mode fast",
        "--max-num-partial-prefills 4",
        "--max-long-partial-prefills 2",
        "--long-prefill-token-threshold 512",
        "--long-prefill-token-threshold 5000 --max-model-len 4096",
        "--disable-chunked-mm-input",
    ),
    "llama, short": (
        "--max-num-seqs 4",
        "--no-enable-chunked-prefill",
        "--max-num-seqs 2048",
        "--max-model-len 101",
    ),
    "llama, long": (
        "--no-enable-chunked-prefill",
        "--no-enable-chunked-prefill --max-num-batched-tokens 8192",
    ),
    "qwen2": ("--max-model-len 40000", "--max-num-seqs 300 --no-enable-prefix-caching"),
    "phi3": ("--max-model-len 131072", "--max-model-len 131073", "--no-enable-chunked-prefill"),
    "mistral": ("--max-model-len 4K --max-num-seqs 3", "--no-enable-chunked-prefill"),
    "mixtral": ("-tp 2 --enable-expert-parallel", "--max-num-batched-tokens 4096"),
    "yarn": ("--max-model-len 131072", "--max-model-len 32768"),
    "linear": ("--max-model-len 131073", "--no-enable-chunked-prefill"),
    "qwen3 next": ("--enable-prefix-caching", "--no-enable-prefix-caching", "--max-num-batched-tokens 4096"),
    "deepseek": ("--no-enable-chunked-prefill --max-model-len 8192", "--max-model-len 1024 --max-num-seqs 1"),
    "paligemma": ("--max-num-seqs 8", "--no-enable-chunked-prefill"),
    "idefics3": ("--max-model-len 512 --max-num-seqs 2", "--disable-chunked-mm-input"),
    "whisper": ("--max-num-seqs 2", "--enable-chunked-prefill"),
}
CASES: tuple[tuple[str, str], ...] = (
    *((model, "") for model in MODELS),
    *((model, words) for model, lines in _WORDS.items() for words in lines),
)
"""Models and the words of commands."""

_NOT_KNOWN = ("are not supported for now", "is not supported with ['", "Can't load feature extractor")
"""What older releases say of models that they do not know, or cannot read without a processor."""


def _fake_platform(base: Any, kind: Any) -> Any:
    """Returns what ``HpuPlatform`` says and does, as far as it decides one of the answers."""

    class Platform(base):  # type: ignore[misc]
        _enum = kind.OOT
        device_name = device_type = "hpu"
        dispatch_key = ray_device_key = "HPU"
        supported_quantization = ()

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "hpu"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 0

        @classmethod
        def check_and_update_config(cls, config: Any) -> None:
            config.parallel_config.worker_cls = "vllm_gaudi.v1.worker.hpu_worker.HPUWorker"
            if not getattr(config.cache_config, "user_specified_block_size", config.cache_config.block_size):
                config.cache_config.block_size = 128
            scheduler = config.scheduler_config
            scheduler.async_scheduling = scheduler.async_scheduling and config.speculative_config is None

        @classmethod
        def support_hybrid_kv_cache(cls) -> bool:
            return True

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return False

    return Platform()


def _platform_of(path: Path) -> Any:
    """Returns the plugin's own platform. Its imports of Gaudi's software are replaced."""
    htorch = types.ModuleType("habana_frameworks.torch")
    internal = types.SimpleNamespace(is_lazy=lambda: False)
    htorch.utils = types.SimpleNamespace(internal=internal)  # type: ignore[attr-defined]
    runtime = types.ModuleType("vllm_gaudi.extension.runtime")
    runtime.get_config = lambda: types.SimpleNamespace(VLLM_CONTIGUOUS_PA=False)  # type: ignore[attr-defined]
    logger = types.ModuleType("vllm_gaudi.extension.logger")
    logger.logger = lambda: logging.getLogger("vllm")  # type: ignore[attr-defined]
    packages = [
        types.ModuleType(name) for name in ("habana_frameworks", "vllm_gaudi", "vllm_gaudi.extension")
    ]
    packages[0].torch = htorch  # type: ignore[attr-defined]
    sys.modules.update({module.__name__: module for module in (*packages, htorch, runtime, logger)})
    found: dict[str, Any] = {"__name__": "vllm_gaudi.platform"}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), found)
    found["HpuPlatform"].simple_compile_backend = "inductor"  # The bridge registers the plugin's.
    return found["HpuPlatform"]()


def steps(platform_file: Path | None) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yields what vLLM makes of each case; None if it does not start."""
    import vllm.platforms
    from vllm.platforms.interface import Platform, PlatformEnum

    vllm.platforms._current_platform = (
        _fake_platform(Platform, PlatformEnum) if platform_file is None else _platform_of(platform_file)
    )
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser
    with directories(MODELS) as folder:
        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        for model, words in CASES:
            try:
                given = ["--model", str(folder / model), "--skip-tokenizer-init", "--load-format", "dummy"]
                arguments = AsyncEngineArgs.from_cli_args(parser.parse_args([*given, *shlex.split(words)]))
                config = arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
            except (Exception, SystemExit) as error:
                if any(text in str(error) for text in _NOT_KNOWN):
                    continue
                print(
                    model, words, type(error).__name__, str(error)[:200].replace("\n", " "), file=sys.stderr
                )
                yield f"{model}: {words}", None  # Whatever it is, the server does not start.
            else:
                yield f"{model}: {words}", _answer(config)


def _answer(config: Any) -> dict[str, Any]:
    scheduler = config.scheduler_config
    return {
        "max_model_len": config.model_config.max_model_len,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_scheduled_tokens": getattr(scheduler, "max_num_scheduled_tokens", None),
        "max_num_seqs": scheduler.max_num_seqs,
        "chunked_prefill": scheduler.enable_chunked_prefill,
        "async_scheduling": bool(scheduler.async_scheduling),
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "block_size": config.cache_config.block_size,
    }


def main() -> None:
    """Prints the table of the vLLM that is installed, or whose sources are given."""
    what, *options = sys.argv[1:]
    file = Path(options[1]) if options else None
    print_table({"lengths": lengths, "steps": steps}[what](file))


if __name__ == "__main__":
    main()
