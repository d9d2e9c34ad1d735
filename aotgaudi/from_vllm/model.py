"""What a model's config.json decides for a server on Gaudi: lengths, layers, dtype, and the bytes of a KV block.

Source of the lengths, by release: ``_get_and_verify_max_len`` in vllm/config/model.py (vllm/config.py up to 0.10) and
``patch_rope_parameters`` in vllm/transformers_utils/config.py; from 0.19.1 on also ``standardize_rope_params`` in
transformers' modeling_rope_utils.py. ``tests/golden/vllm_answers.py`` asks vLLM itself. tokenizer_config.json counts for
pooling models alone (since 0.10.1), and a sliding window only under --disable-sliding-window; a spec takes neither.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, TypeGuard

from aotgaudi.bucketing.versions import EnvironmentRules
from aotgaudi.errors import SpecError, shown
from aotgaudi.manifest.memory import KvCache
from aotgaudi.spec.build_spec import ParallelSpec
from aotgaudi.spec.cache_rows import family_of
from aotgaudi.spec.layer_kinds import layer_kinds
from aotgaudi.spec.model import POSITION_KEYS, ModelSpec
from aotgaudi.spec.parse import finite_json
from aotgaudi.spec.quantization import QuantizationSpec

CONFIG = "the model's config.json"

# Releases

_LONGROPE_SHORTENS = (0, 11, 2)
"""From here on longrope serves ``original_max_position_embeddings`` of the config without --max-model-len."""
PARAMETERS = (0, 13)
"""From here on ``rope_parameters`` counts where ``rope_scaling`` is not given, and an original count beside it replaces the
one in it."""
TRANSFORMERS_5 = (0, 19, 1)
"""From here on parameters may be given for each type of layer, a type that is not given is ``default``, a factor of null is
1, yarn's original count is that of the config, and ``rope_scaling`` is another name of ``rope_parameters``."""
_YARN_IS_SCALED = (0, 30)
"""From here on (PR 56446) a config's own count is taken to be scaled by yarn already. Before, yarn's length is
``original_max_position_embeddings * factor``."""

_RELEASES: Mapping[str, str] = {
    "vllm-gaudi@091bbad": "0.27.1",
    "vllm-gaudi@v0.20.0rc0": "0.19.0",
    "vllm-hpu-extension@29bc7a4": "0.8.5.post1",
    "vllm-hpu-extension@2b4ba56": "0.7.2",
}
"""The vLLM of versions that no release of vLLM is named like. v0.20.0rc0 requires transformers 4. vllm-fork's releases for
Gaudi 1.21 require the last two (requirements-hpu.txt)."""

_FORK = "0.9.0.1"
"""The vLLM of vllm-fork's release for Gaudi 1.22, taken for all other versions of the extension."""

_UNSCALED, _YARNS = ("longrope", "llama3"), ("yarn", "deepseek_yarn", "deepseek_llama_scaling")
_LEGACY = {"su": "longrope", "mrope": "default", "telechat3-yarn": "yarn"}
_NEEDED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",)),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
ORIGINAL = "original_max_position_embeddings"
_ORIGINAL_BY_DEFAULT = {"phi3": 4096}
"""What transformers fills in for a model type."""


def release_numbers(release: str) -> tuple[int, ...]:
    """Returns the numbers of a release, which order releases."""
    return tuple(int(number) for number in re.findall(r"\d+", release)[:4])


# Lengths


@dataclass(frozen=True, slots=True)
class ServedLength:
    """What a release makes of a config.

    Attributes:
        vllm: the release of vLLM.
        by_default: the length without --max-model-len.
        most: the greatest --max-model-len that is taken without VLLM_ALLOW_LONG_MAX_MODEL_LEN.
        rule: how `by_default` follows from the config.
        rule_of_most: how `most` does.
    """

    vllm: str
    by_default: int
    most: float
    rule: str
    rule_of_most: str


def vllm_release(version: str) -> str:
    """Returns the release of vLLM that a version of the plugin, one of ``spec.bucketing.VersionName``, builds on."""
    _, _, name = version.partition("vllm-gaudi@")
    return _RELEASES.get(version) or (name.removeprefix("v") if name else _FORK)


def served_length(text: Mapping[str, Any], release: str) -> ServedLength | None:
    """Returns how long sequences `release` of vLLM serves for the keys of a language model; None if no key says.

    Raises:
        SpecError: a RoPE that this vLLM does not start with.
    """
    found = _positions(text)
    if found is None:
        return None
    key, positions = found
    numbers = release_numbers(release)
    rope_type, rope = _rope(text, release)
    what, base, factor = key, positions, 1.0
    if rope_type not in (_UNSCALED if numbers < _YARN_IS_SCALED else _UNSCALED + _YARNS):
        factor = _factor(rope, release)
        if rope_type == "yarn":
            what, base = ORIGINAL, _yarn_original(text, rope, positions, release)
    most = min(base * factor, sys.maxsize)  # The product may be infinite.
    rule = f"{what} {base:,}" + (f" x factor {factor:g} ({rope_type})" if factor != 1 else "")
    limit = text.get("model_max_length")
    taken = max(most, limit) if _is_length(limit) else most
    original = text.get(ORIGINAL, _ORIGINAL_BY_DEFAULT.get(str(text.get("model_type"))))
    if rope_type == "longrope" and numbers >= _LONGROPE_SHORTENS and _is_length(original):
        return ServedLength(release, int(original), taken, f"{ORIGINAL} {original:,} (longrope)", rule)
    return ServedLength(release, int(most), taken, rule, rule)


def _positions(text: Mapping[str, Any]) -> tuple[str, float] | None:
    """Returns the key that decides, and its count: the least, unless there is a model_max_length (Command-R)."""
    known = {name: text[name] for name in POSITION_KEYS if _is_length(text.get(name))}
    if not known:
        return None
    key = "model_max_length" if "model_max_length" in known else min(known, key=lambda name: known[name])
    return key, known[key]


def _rope(text: Mapping[str, Any], release: str) -> tuple[str, Mapping[str, Any]]:
    """Returns the type and the parameters of a config's RoPE. One that is given for each type of layer scales nothing."""
    numbers = release_numbers(release)
    names = ("rope_scaling", "rope_parameters") if numbers >= PARAMETERS else ("rope_scaling",)
    where = next((name for name in names if text.get(name)), "")
    given = text.get(where)
    if not isinstance(given, dict) or "gemma3" in str(text.get("model_type")):
        return "default", {}
    if all(value is None or isinstance(value, dict) for value in given.values()):
        if numbers < TRANSFORMERS_5:
            raise _refused(where, "is given for each type of layer", release, "one set of parameters")
        return "default", {}
    return _type(given, where, release), given


def _factor(rope: Mapping[str, Any], release: str) -> float:
    factor = rope.get("factor", 1.0)
    if factor is None and release_numbers(release) >= TRANSFORMERS_5:
        return 1.0
    if not _is_length(factor):
        raise _refused("rope_scaling", f"has the factor {shown(str(factor))}", release, "a number")
    return factor


def _type(rope: Mapping[str, Any], where: str, release: str) -> str:
    """Returns the type of a RoPE. Raises SpecError if there is none, two, or one whose parameters are missing."""
    standardizes = release_numbers(release) >= TRANSFORMERS_5
    modern, legacy = (
        None if rope.get(key) is None else _LEGACY.get(str(rope[key]), str(rope[key]))
        for key in ("rope_type", "type")
    )
    if standardizes and legacy and modern and legacy != modern:
        problem = f"has rope_type {shown(modern)} and type {shown(legacy)}"
        raise _refused(where, problem, release, "one of them")
    name = (modern or legacy) if standardizes else (legacy or modern)
    if name is None and not standardizes:
        raise _refused(where, "has no rope_type", release, "one of linear, dynamic, yarn, longrope, llama3")
    missing = [key for key in _NEEDED.get(name or "", ()) if key not in rope]
    if missing:
        raise _refused(where, f"has no {missing[0]}, which {name} needs", release, "give it")
    return name or "default"


def _yarn_original(text: Mapping[str, Any], rope: Mapping[str, Any], positions: float, release: str) -> float:
    outside = text.get(ORIGINAL) if release_numbers(release) >= PARAMETERS else None
    original = rope.get(ORIGINAL) if outside is None else outside
    if original is None and release_numbers(release) >= TRANSFORMERS_5:
        original = text.get("max_position_embeddings", positions)
    if not _is_length(original):
        raise _refused("rope_scaling", f"has no {ORIGINAL}, which yarn needs", release, "give it")
    return original


def _refused(where: str, problem: str, release: str, remedy: str) -> SpecError:
    return SpecError(f"{CONFIG}: {where}", f"{problem}: vLLM {release} does not start with that", remedy)


def _is_length(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and 0 < value < inf


# Layers, dtype, and the bytes of a block

DtypeName = Literal["float32", "bfloat16", "float16"]

DTYPES: Mapping[str, DtypeName] = {
    "bfloat16": "bfloat16",
    "half": "float16",
    "float16": "float16",
    "float": "float32",
    "float32": "float32",
}
_ONE_OF_DTYPES = f"one of {', '.join(sorted(DTYPES))}"

_EXPERT_KEYS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
_TEXT_KEYS = ("llm_config", "language_config", "thinker_config")
"""Where multimodal configs have the language model's keys, besides ``text_config``, which `ModelFacts.text` has."""
_MAMBA_LAYERS = ("mamba", "mamba2", "gdn_attention", "linear_attention")
_OTHER_STATES = ("falcon_h1", "lfm2", "lfm2_moe", "recurrent_gemma")
"""Models with states that the plugin does not count as mamba-like layers (hpu_model_runner.py 1354)."""
_INTERLEAVED_TYPES = ("gemma2", "gemma3", "gemma3_text", "cohere2", "gpt_oss", "gemma4", "gemma4_text")
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
    def keeps_states(self) -> bool:
        """Whether vLLM counts the model as hybrid. `has_mamba` is what the plugin counts."""
        return self.has_mamba or self.text.get("model_type") in _OTHER_STATES

    @property
    def has_experts(self) -> bool:
        """Follows vLLM's ``get_num_experts`` (vllm/transformers_utils/model_arch_config_convertor.py)."""
        tables = [self.text, *(one for name in _TEXT_KEYS if isinstance(one := self.text.get(name), Mapping))]
        tables += [one for table in tables[1:] if isinstance(one := table.get("text_config"), Mapping)]
        count = next((table[name] for table in tables for name in _EXPERT_KEYS if name in table), 0)
        if isinstance(count, list):
            return any(count[:1])
        blocks = self.text.get("block_configs")
        parts = [one for one in blocks if isinstance(one, Mapping)] if isinstance(blocks, list) else []
        return bool(count) or any(
            one.get("n_routed_experts") for one in parts if one.get("block_type") == "moe"
        )

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether an encoder computes the prompt."""
        return self.text.get("is_encoder_decoder") is True

    @property
    def dtype(self) -> DtypeName | None:
        """The dtype that the config names, or None. Raises SpecError for an unknown dtype."""
        value = self.text.get("dtype", self.text.get("torch_dtype"))
        if value is None:
            return None
        name = str(value).removeprefix("torch.")
        if name not in DTYPES:
            raise SpecError(CONFIG, f"has the dtype {shown(name)}", _ONE_OF_DTYPES)
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
        raise SpecError("--dtype", f"is {shown(text)}", f"auto, or {_ONE_OF_DTYPES}")
    asked = (facts.dtype or "float32") if text == "auto" else DTYPES[text]
    if asked == "bfloat16" or (asked == "float32" and rules.is_extension):
        return asked, ()
    origin = "--dtype" if text != "auto" else "config.json"
    if text == "auto" and not facts.dtype:
        origin = "vLLM, where config.json says none,"
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
