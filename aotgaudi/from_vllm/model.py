"""What a model's config.json decides for a server on Gaudi: layers, dtype, and the bytes of a KV block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from aotgaudi.bucketing.versions import EnvironmentRules
from aotgaudi.errors import SpecError, shown
from aotgaudi.from_vllm.model_len import CONFIG
from aotgaudi.manifest.memory import KvCache
from aotgaudi.spec.build_spec import ParallelSpec
from aotgaudi.spec.cache_rows import family_of
from aotgaudi.spec.layer_kinds import layer_kinds
from aotgaudi.spec.model import POSITION_KEYS, ModelSpec
from aotgaudi.spec.parse import finite_json
from aotgaudi.spec.quantization import QuantizationSpec

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
_OTHER_STATES = frozenset({"falcon_h1", "lfm2", "lfm2_moe", "recurrent_gemma"})
"""Models with states that the plugin does not count as mamba-like layers (hpu_model_runner.py 1354)."""
_INTERLEAVED_TYPES = frozenset(
    {"gemma2", "gemma3", "gemma3_text", "cohere2", "gpt_oss", "gemma4", "gemma4_text"}
)
_VLLM_CHUNK = 2048
_GAUDI_CHUNK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What decides one device's part of the KV cache, besides the config."""

    dtype: DtypeName
    quantization: QuantizationSpec | None
    parallel: ParallelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a server reads from a config, by one version's rules.

    Attributes:
        text: the language model's keys: the config itself, or its ``text_config``.
        length_keys: the same, but nothing from outside a ``text_config`` that tells a length itself.
        has_mamba: whether any layer keeps a recurrent state.
        has_interleaved_windows: whether layers with and without a sliding window alternate.
        mamba_chunk_size: 0 without such layers.
        has_vision: whether the model takes images.
        is_quantized: whether the checkpoint's weights are quantized.
    """

    text: Mapping[str, Any]
    length_keys: Mapping[str, Any]
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
        tells_length = isinstance(nested, dict) and not nested.keys().isdisjoint(POSITION_KEYS)
        has_mamba = _has_mamba(text)
        chunk, is_explicit = _mamba_chunk(text, rules) if has_mamba else (0, False)
        return cls(
            text=text,
            length_keys=nested if tells_length and isinstance(nested, dict) else text,
            has_mamba=has_mamba,
            has_interleaved_windows=_has_interleaved_windows(text),
            mamba_chunk_size=chunk,
            mamba_chunk_size_is_explicit=is_explicit,
            has_vision=isinstance(config.get("vision_config"), dict),
            is_quantized="quantization_config" in config or "quantization_config" in text,
        )

    @property
    def dtype(self) -> DtypeName | None:
        """The dtype that the config names, or None. Raises SpecError for an unknown dtype."""
        value = self.text.get("dtype", self.text.get("torch_dtype"))
        if value is None:
            return None
        name = str(value).removeprefix("torch.")
        if name not in DTYPES:
            raise SpecError(
                CONFIG,
                f"has the dtype {shown(name)}",
                f"one of {', '.join(sorted(DTYPES))}",
            )
        return DTYPES[name]


def _has_mamba(text: Mapping[str, Any]) -> bool:
    layers = text.get("layers_block_type") or text.get("layer_types")
    if isinstance(layers, list):
        return any(layer in _MAMBA_LAYERS for layer in layers)
    if text.get("model_type") in _OTHER_STATES:
        return False
    kinds = layer_kinds(text)
    return kinds is None or "state" in kinds


def _mamba_chunk(text: Mapping[str, Any], rules: EnvironmentRules) -> tuple[int, bool]:
    """Returns the chunk size in tokens, and whether the config contains it."""
    if rules.mamba == "none":
        return 0, False
    for name in ("mamba_chunk_size", "chunk_size"):
        value = text.get(name)
        if value is not None:
            if type(value) is not int or value < 1:
                raise SpecError(CONFIG, f"has {name} {shown(str(value))}", "a positive integer")
            return value, True
    return (_VLLM_CHUNK if rules.mamba == "model" else _GAUDI_CHUNK), False


def _has_interleaved_windows(text: Mapping[str, Any]) -> bool:
    """Follows vLLM's ``is_interleaved``. In older configs the model's type implies the pattern."""
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return False
    layers = text.get("layer_types")
    if isinstance(layers, list):
        return len({str(layer) for layer in layers}) > 1
    return "sliding_window_pattern" in text or text.get("model_type") in _INTERLEAVED_TYPES


def served_dtype(text: str, facts: ModelFacts, rules: EnvironmentRules) -> tuple[DtypeName, tuple[str, ...]]:
    """Returns the dtype for the text of --dtype, and a note if Gaudi replaces it (vllm_gaudi/platform.py 234).

    Raises:
        SpecError: a dtype that vLLM does not have.
    """
    if text != "auto" and text not in DTYPES:
        raise SpecError("--dtype", f"is {shown(text)}", f"auto, or one of {', '.join(sorted(DTYPES))}")
    asked = (facts.dtype or "float32") if text == "auto" else DTYPES[text]
    if asked == "bfloat16" or (asked == "float32" and rules.is_extension):
        return asked, ()
    origin = (
        "--dtype"
        if text != "auto"
        else "config.json"
        if facts.dtype
        else "vLLM, where config.json says none,"
    )
    return "bfloat16", (f"{origin} asks for {asked}; Gaudi serves bfloat16 in its place",)


def kv_block_bytes(facts: ModelFacts, block_size: int, device: Device) -> int:
    """Returns the bytes of one KV block on one device (`aotgaudi.manifest.memory.KvCache`).

    Raises:
        SpecError: the config lacks a key, or the model's layers keep different kinds of caches. Upstream's count then
            depends on how it groups the layers.
    """
    config = finite_json(facts.text)
    try:
        model = ModelSpec(name="-", dtype=device.dtype, config=config, quantization=device.quantization)
        if facts.has_mamba or facts.has_interleaved_windows or family_of(model) == "compressed":
            raise SpecError(
                "--free-memory",
                "does not tell the blocks of a model whose layers keep unlike caches",
                "--num-blocks N",
            )
        return KvCache.of_model(model, device.parallel, block_size).block_bytes
    except SpecError as error:
        _, is_key, key = error.where.partition("model.config.")
        if not is_key:
            raise
        raise SpecError(f"{CONFIG}: {key}", error.problem, f"{error.remedy}, or --num-blocks N") from error
