"""Asks vLLM itself how long sequences may be under --hf-overrides, and prints the answers as a golden table.

As `vllm_answers`: run it with the interpreter of an environment that has vLLM, and save what it prints as
``data/vllm-overrides/RELEASE.json``. A case whose RoPE the model cannot be built with counts as one that does not start.
An older release need not be installed: unpack its wheel and the transformers that it allows, and set PYTHONPATH to both.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.golden.vllm_answers import CONFIGS, directories, lengths_of, print_table

PLAIN, LINEAR, YARN = CONFIGS["plain"], CONFIGS["linear"], CONFIGS["yarn"]
_PART = {key: value for key, value in PLAIN.items() if key != "architectures"}
PARTS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llava",
    "text_config": _PART,
    "vision_config": {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
}
SCALED_PARTS = {**PARTS, "text_config": {**_PART, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}}
_LINEAR = {"rope_type": "linear", "factor": 2.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16384}
_LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": (PLAIN, {}),
    "fewer positions": (PLAIN, {"max_position_embeddings": 4096}),
    "more positions": (PLAIN, {"max_position_embeddings": 131072}),
    "model_max_length": (PLAIN, {"model_max_length": 8192}),
    "another key's positions": (CONFIGS["gpt2"], {"n_positions": 4096}),
    "theta": (LINEAR, {"rope_theta": 500000.0}),
    "scaling": (PLAIN, {"rope_scaling": _LINEAR}),
    "scaling instead": (LINEAR, {"rope_scaling": _LINEAR}),
    "parameters": (PLAIN, {"rope_parameters": {**_LINEAR, "rope_theta": 10000.0}}),
    "parameters instead of scaling": (LINEAR, {"rope_parameters": _LINEAR}),
    "no scaling": (LINEAR, {"rope_scaling": None}),
    "no parameters": (LINEAR, {"rope_parameters": None}),
    "empty": (LINEAR, {"rope_scaling": {}}),
    "old key": (PLAIN, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "no type": (LINEAR, {"rope_scaling": {"factor": 2.0}}),
    "no factor": (PLAIN, {"rope_scaling": {"rope_type": "linear"}}),
    "null factor": (PLAIN, {"rope_scaling": {"rope_type": "dynamic", "factor": None}}),
    "yarn": (PLAIN, {"rope_scaling": _YARN}),
    "yarn, no original": (PLAIN, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    "longrope": (PLAIN, {"rope_scaling": {**_LONG, "original_max_position_embeddings": 4096}}),
    "longrope, original outside": (
        {**PLAIN, "original_max_position_embeddings": 4096},
        {"rope_scaling": {**_LONG, "original_max_position_embeddings": 4096}},
    ),
    "a dtype": (PLAIN, {"dtype": "float32"}),
    "positions and scaling": (PLAIN, {"max_position_embeddings": 8192, "rope_scaling": _LINEAR}),
    "a part that is not there": (PLAIN, {"text_config": {"max_position_embeddings": 4096}}),
    "a part's positions": (PARTS, {"text_config": {"max_position_embeddings": 4096}}),
    "not the part's positions": (PARTS, {"max_position_embeddings": 4096}),
    "not the part's scaling": (PARTS, {"rope_scaling": _LINEAR}),
    "a part's scaling": (PARTS, {"text_config": {"rope_scaling": _LINEAR}}),
    "a part's parameters": (PARTS, {"text_config": {"rope_parameters": _LINEAR}}),
    "one key of a part's scaling": (SCALED_PARTS, {"text_config": {"rope_scaling": {"factor": 2.0}}}),
    "one key of its other name": (SCALED_PARTS, {"text_config": {"rope_parameters": {"factor": 2.0}}}),
    "one key of a part's default": (PARTS, {"text_config": {"rope_parameters": {"factor": 2.0}}}),
    "a part's type alone": (SCALED_PARTS, {"text_config": {"rope_scaling": {"rope_type": "dynamic"}}}),
    "a part's old key": (SCALED_PARTS, {"text_config": {"rope_scaling": {"type": "dynamic"}}}),
    "a part's yarn, no original": (SCALED_PARTS, {"text_config": {"rope_parameters": {"rope_type": "yarn"}}}),
    "a part without parameters": (SCALED_PARTS, {"text_config": {"rope_parameters": None}}),
    "no scaling, but parameters": (CONFIGS["rope_parameters"], {"rope_scaling": None}),
    "no parameters at all": (CONFIGS["rope_parameters"], {"rope_parameters": None}),
    "scaling for parameters": (CONFIGS["rope_parameters"], {"rope_scaling": _LINEAR}),
    "a part without scaling": (SCALED_PARTS, {"text_config": {"rope_scaling": None}}),
}  # fmt: skip


def _ask(root: Path) -> Any:
    from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: (
        function()
    )  # Else a vLLM that cannot compute here cannot be asked.
    taken = inspect.signature(get_rope).parameters

    def ask(name: str, length: int | None) -> int:
        path = str(root / name)
        config = ModelConfig(
            model=path,
            tokenizer=path,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=length,
            hf_overrides=CASES[name][1],
        )
        text = config.hf_text_config
        rope = getattr(text, "rope_parameters" if "rope_parameters" in taken else "rope_scaling", None)
        given = {
            "head_size": 16,
            "rotary_dim": 16,
            "max_position": text.max_position_embeddings,
            "base": 10000,
        }
        given.update(rope_parameters=rope, rope_scaling=rope)
        around = VllmConfig(model_config=config)
        with set_current_vllm_config(around):
            get_rope(**{name: value for name, value in given.items() if name in taken}, is_neox_style=True)
        return config.max_model_len

    return ask


def overrides() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the lengths of each case."""
    with directories({name: config for name, (config, _) in CASES.items()}) as root:
        ask = _ask(root)
        yield from ((name, lengths_of(name, ask)) for name in CASES)


if __name__ == "__main__":
    print_table(overrides())
