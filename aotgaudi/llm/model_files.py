"""Reads the small JSON files of a model directory: sampling defaults, special tokens, end-of-sequence ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aotgaudi.bundle.model_directory import (
    CONFIG,
    GENERATION_CONFIG,
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG,
    ModelDirectory,
)
from aotgaudi.engine.admission import check_sampling
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.errors import RequestError, SpecError
from aotgaudi.spec.sampler import SamplerSpec

SAMPLING_DEFAULTS: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Fields of generation_config.json that vLLM also reads -> fields of `SamplingParams`."""

_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)


def eos_token_ids(model: ModelDirectory) -> frozenset[int]:
    """Returns the end-of-sequence ids from generation_config.json, or else from config.json."""
    for name in (GENERATION_CONFIG, CONFIG):
        declared = model.read_object(name).get("eos_token_id")
        if declared is not None:
            ids = declared if isinstance(declared, list) else [declared]
            return frozenset(item for item in ids if isinstance(item, int))
    return frozenset()


def special_tokens(model: ModelDirectory) -> dict[str, str]:
    """Returns special tokens by name (``bos_token``, ...). tokenizer_config.json overrides special_tokens_map.json.

    Raises:
        SpecError: one of the files is not JSON.
    """
    found: dict[str, str] = {}
    for file_name in (SPECIAL_TOKENS, TOKENIZER_CONFIG):
        config = model.read_object(file_name)
        for name in _SPECIAL_TOKEN_NAMES:
            value = config.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


@dataclass(frozen=True)
class GenerationConfig:
    """Where sampling defaults come from, in vLLM's terms.

    Attributes:
        source: "auto" for the model directory's generation_config.json, if it has one; "vllm" for no defaults; else a
            directory with a generation_config.json.
        override: Values that replace those of the file, under the same names.
    """

    source: str = "auto"
    override: Mapping[str, Any] = field(default_factory=dict)

    def defaults(self, model: ModelDirectory) -> dict[str, Any]:
        """Returns the defaults, by field of `SamplingParams`.

        Raises:
            SpecError: the file cannot be read, or a value is out of range. Names the file or the value.
        """
        if self.source not in ("auto", "vllm"):
            model = ModelDirectory(Path(self.source))  # The operator chose it. No bundle binds it.
            if not (model.path / GENERATION_CONFIG).is_file():
                raise SpecError(
                    str(model.path / GENERATION_CONFIG),
                    "does not exist",
                    "--generation-config auto, vllm, or a directory with one",
                )
        path = model.path / GENERATION_CONFIG
        stated = {} if self.source == "vllm" else model.read_object(GENERATION_CONFIG)
        defaults: dict[str, Any] = {}
        for name, param in SAMPLING_DEFAULTS.items():
            value = self.override.get(name, stated.get(name))
            if value is not None:
                _check(param, value, "--override-generation-config" if name in self.override else str(path))
                defaults[param] = value
        return defaults


def _check(param: str, value: object, where: str) -> None:
    try:
        SamplingParams(**{param: value})  # type: ignore[arg-type]
    except RequestError as error:
        raise SpecError(
            where, str(error), "mend it, or leave it out with --generation-config vllm"
        ) from error


def split_by_sampler(
    defaults: Mapping[str, Any], sampler: SamplerSpec
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the defaults that `sampler` supports, and the reason for each of the others."""
    able: dict[str, Any] = {}
    unable: dict[str, str] = {}
    for param, value in defaults.items():
        try:
            check_sampling(SamplingParams(**{param: value}), sampler)
        except RequestError as error:
            if error.param == param:  # Otherwise the error is about the default temperature of 1.
                unable[param] = str(error)
                continue
        able[param] = value
    return able, unable
