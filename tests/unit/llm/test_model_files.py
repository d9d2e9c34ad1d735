"""Sampling defaults: from where, what they may be, and which of them a sampler can do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.bundle.model_directory import ModelDirectory
from aotgaudi.errors import SpecError
from aotgaudi.llm.model_files import GenerationConfig, eos_token_ids, split_by_sampler
from aotgaudi.spec.sampler import SamplerSetting, SamplerSpec

STATED = {
    "do_sample": True,
    "eos_token_id": [2, 7],
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": None,
    "max_new_tokens": 2048,
}
DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 2048}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write(tmp_path / "model", STATED)


def write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_auto_takes_the_models_own(model_dir: Path) -> None:
    assert GenerationConfig().defaults(ModelDirectory(model_dir)) == DEFAULTS


def test_vllm_takes_none(model_dir: Path) -> None:
    assert GenerationConfig("vllm").defaults(ModelDirectory(model_dir)) == {}


def test_a_directory_replaces_the_models_own(model_dir: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", {"temperature": 0.1})

    assert GenerationConfig(str(other)).defaults(ModelDirectory(model_dir)) == {"temperature": 0.1}


@pytest.mark.parametrize("source", ["auto", "vllm"])
def test_what_is_overridden_wins(model_dir: Path, source: str) -> None:
    defaults = GenerationConfig(source, {"temperature": 0, "max_new_tokens": 5}).defaults(
        ModelDirectory(model_dir)
    )

    assert (defaults["temperature"], defaults["max_tokens"]) == (0, 5)


def test_a_model_without_the_file_has_none(tmp_path: Path) -> None:
    assert GenerationConfig().defaults(ModelDirectory(tmp_path)) == {}


def test_a_directory_without_the_file_is_refused(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"generation_config\.json: does not exist"):
        GenerationConfig(str(tmp_path)).defaults(ModelDirectory(model_dir))


def test_a_value_out_of_range_is_refused_by_place_and_name(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"generation_config\.json: temperature must be a number from 0 to 2"):
        GenerationConfig().defaults(ModelDirectory(write(tmp_path, {"temperature": "hot"})))
    with pytest.raises(SpecError, match=r"--override-generation-config: top_p must be"):
        GenerationConfig("vllm", {"top_p": 7}).defaults(ModelDirectory(tmp_path))


def test_what_the_sampler_was_not_built_for_is_told_apart() -> None:
    sampler = SamplerSpec(settings=(SamplerSetting(temperature=1, top_p=1, top_k=0),))

    able, unable = split_by_sampler({"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}, sampler)

    assert able == {"temperature": 0.6}
    assert unable.keys() == {"top_p", "repetition_penalty"}
    assert "a penalty" in unable["repetition_penalty"]


def test_a_neutral_default_needs_nothing_of_the_sampler() -> None:
    sampler = SamplerSpec(settings=(SamplerSetting(temperature=0, top_p=1, top_k=0),))

    able, unable = split_by_sampler({"repetition_penalty": 1.0, "temperature": 0}, sampler)

    assert able == {"repetition_penalty": 1.0, "temperature": 0}
    assert unable == {}


@pytest.mark.parametrize(("declared", "ids"), [([2, 7], {2, 7}), (2, {2}), (None, {9})])
def test_end_of_sequence_ids_come_from_the_generation_config_first(
    tmp_path: Path, declared: object, ids: set[int]
) -> None:
    write(tmp_path, {"eos_token_id": declared})
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}', encoding="utf-8")

    assert eos_token_ids(ModelDirectory(tmp_path)) == ids
