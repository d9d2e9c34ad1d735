"""Asks vLLM itself how long the sequences of a model may be, and prints the answers as a golden table.

Run it with the interpreter of an environment that has vLLM, and save what it prints as
``data/vllm-lengths/RELEASE.json``; `test_vllm_lengths` compares our rule with every such file::

    VLLM_PLUGINS= PYTHON tests/golden/vllm_lengths.py > tests/golden/data/vllm-lengths/0.32.0.json

For a release that cannot run here, ``--sources DIR`` takes the folder ``vllm`` of its wheel: the functions that derive the
length are taken out of its files and called with the transformers of PYTHON, which must be one that the release allows.
"""

from __future__ import annotations

import ast
import json
import logging
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

LENGTHS = (4096, 8192, 32768, 65536, 131072, 131073)
"""Values of --max-model-len that are tried."""

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
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")
_FACTORS = [1.0] * 8
_LONG = {"short_factor": _FACTORS, "long_factor": _FACTORS}
_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _rope(type_name: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": type_name, **parameters}}


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
CASES: dict[str, dict[str, Any]] = {name: {**_LLAMA, **change} for name, change in _CHANGES.items()}
del CASES["gpt2"]["max_position_embeddings"]


def answers(name: str, ask: Any) -> dict[str, Any]:
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


def _write_models(root: Path) -> None:
    for name, config in CASES.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config), encoding="utf-8")


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


def main() -> None:
    """Prints the table of the vLLM that is installed, or whose sources are given."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _write_models(root)
        ask = (
            _of_sources(root, Path(sys.argv[2])) if sys.argv[1:2] == ["--sources"] else _of_model_config(root)
        )
        table = {name: answers(name, ask) for name in CASES}
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in table.items())
    print(f"{{\n{rows}\n}}")


if __name__ == "__main__":
    main()
