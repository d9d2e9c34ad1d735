"""What a model's config.json decides for a server on Gaudi."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from aotgaudi.bucketing.rules import EnvironmentRules
from aotgaudi.errors import SpecError
from aotgaudi.vllm.values import shown

DtypeName = Literal["float32", "bfloat16", "float16"]

DTYPES: Mapping[str, DtypeName] = {
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "half": "float16",
    "float16": "float16",
    "fp16": "float16",
    "float": "float32",
    "float32": "float32",
    "fp32": "float32",
}

_MAMBA_LAYERS = frozenset({"mamba", "mamba2", "gdn_attention", "linear_attention"})
_INTERLEAVED_TYPES = frozenset(
    {"gemma2", "gemma3", "gemma3_text", "cohere2", "gpt_oss", "gemma4", "gemma4_text"}
)
_VLLM_CHUNK = 2048
_GAUDI_CHUNK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Derived from a config, at one version of the rules.

    Attributes:
        text: the language model's keys: the config itself, or its ``text_config``.
        has_mamba: whether any layer keeps a recurrent state.
        has_interleaved_windows: whether layers with and without a sliding window alternate.
        mamba_chunk_size: 0 without such layers.
        has_vision: whether the model takes images.
        is_quantized: whether the checkpoint's weights are.
    """

    text: Mapping[str, Any]
    has_mamba: bool
    has_interleaved_windows: bool
    mamba_chunk_size: int
    mamba_chunk_size_is_explicit: bool
    has_vision: bool
    is_quantized: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], rules: EnvironmentRules) -> ModelFacts:
        """Reads a config as vllm_gaudi/v1/worker/hpu_model_runner.py 1281, 1358-1414 does."""
        nested = config.get("text_config")
        text = {**config, **nested} if isinstance(nested, dict) else config
        has_mamba = _has_mamba(text)
        chunk, is_explicit = _mamba_chunk(text, rules) if has_mamba else (0, False)
        return cls(
            text=text,
            has_mamba=has_mamba,
            has_interleaved_windows=_has_interleaved_windows(text),
            mamba_chunk_size=chunk,
            mamba_chunk_size_is_explicit=is_explicit,
            has_vision=isinstance(config.get("vision_config"), dict),
            is_quantized="quantization_config" in config or "quantization_config" in text,
        )

    @property
    def dtype(self) -> DtypeName | None:
        """The dtype that the config names; None where it names none. Raises SpecError for another one."""
        value = self.text.get("dtype", self.text.get("torch_dtype"))
        if value is None:
            return None
        name = str(value).removeprefix("torch.")
        if name not in DTYPES:
            raise SpecError(
                "the model's config.json",
                f"has the dtype {shown(name)}",
                f"one of {', '.join(sorted(DTYPES))}",
            )
        return DTYPES[name]


def _has_mamba(text: Mapping[str, Any]) -> bool:
    layers = text.get("layers_block_type") or text.get("layer_types")
    if isinstance(layers, list):
        return any(layer in _MAMBA_LAYERS for layer in layers)
    pattern = text.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return "M" in pattern
    is_hybrid_by_interval = "full_attention_interval" in text and "linear_num_key_heads" in text
    return is_hybrid_by_interval or "mamba" in str(text.get("model_type", ""))


def _mamba_chunk(text: Mapping[str, Any], rules: EnvironmentRules) -> tuple[int, bool]:
    """Returns the chunk size, in tokens, and whether the config says it."""
    if rules.mamba == "none":
        return 0, False
    for name in ("mamba_chunk_size", "chunk_size"):
        value = text.get(name)
        if value is not None:
            if type(value) is not int or value < 1:
                raise SpecError(
                    "the model's config.json", f"has {name} {shown(str(value))}", "a positive integer"
                )
            return value, True
    return (_VLLM_CHUNK if rules.mamba == "model" else _GAUDI_CHUNK), False


def _has_interleaved_windows(text: Mapping[str, Any]) -> bool:
    """Follows vLLM's ``is_interleaved``; older configs leave the pattern to the model's type."""
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return False
    layers = text.get("layer_types")
    if isinstance(layers, list):
        return len({str(layer) for layer in layers}) > 1
    return "sliding_window_pattern" in text or text.get("model_type") in _INTERLEAVED_TYPES
