"""Mixers: which one a model has, what is refused without one, and latent attention's own shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aotgaudi.entries import DecodeEntry, DefragEntry, PromptEntry
from aotgaudi.errors import SpecError
from aotgaudi.graphs.mixers.families import require_mixer
from aotgaudi.graphs.step import build_model
from aotgaudi.graphs.trace import trace
from aotgaudi.spec.model import ModelSpec
from tests.integration.models import reference, spec_of

DECODE = DecodeEntry(4, 1, 16)
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")


@pytest.mark.parametrize("architecture", LATENT)
def test_latent_attention_keeps_one_row_a_token(architecture: str) -> None:
    spec = spec_of(reference(architecture))

    caches = trace(DefragEntry(8), spec.model, spec.limits).caches

    assert [cache.name for cache in caches] == ["0", "1", "2"]
    assert {cache.shape for cache in caches} == {(1, "num_blocks + 1", 1, 16, 32 + 8)}


def test_latent_rows_are_read_in_place_by_decode_steps_of_any_number_of_blocks() -> None:
    spec = spec_of(reference("deepseek_v3"))

    pieces = trace(DECODE, spec.model, spec.limits).pieces
    layers = [piece for piece in pieces if piece.label == "layer"]

    assert [piece.text.count("aotgaudi.paged_decode.default") for piece in layers] == [1, 1, 1]
    assert all('["input","float32",[1,"N",1,16,40]' in piece.text for piece in layers)
    assert len({piece.text for piece in layers}) == 2, "a dense layer, and two with experts"


def _config(model_type: str) -> dict[str, Any]:
    from transformers import AutoConfig

    config: dict[str, Any] = json.loads(AutoConfig.for_model(model_type).to_json_string(use_diff=False))
    return config


@pytest.mark.parametrize(
    ("model_type", "what"),
    [
        ("deepseek_v32", "the keys of its indexer"),
        ("glm_moe_dsa", "the keys of its indexer"),
        ("glm5_next", "recurrent state of its linear attention"),
        ("kimi_linear", "recurrent state of its linear attention"),
        ("qwen3_next", "recurrent state of its linear attention"),
        ("mamba", "recurrent state"),
    ],
)
def test_a_model_without_a_mixer_is_refused_and_what_is_missing_is_named(model_type: str, what: str) -> None:
    model = ModelSpec(name="x", dtype="float32", config=_config(model_type))
    limits = spec_of(reference("llama")).limits

    with pytest.raises(
        SpecError, match=rf"'{model_type}\w*' keeps more than .* no mixer for it exists: .*{what}"
    ):
        trace(DECODE, model, limits)


def test_a_stateful_model_whose_config_tells_of_nothing_is_refused() -> None:
    llama = spec_of(reference("llama")).model

    require_mixer(llama, is_stateful=False)
    with pytest.raises(
        SpecError, match=r"'llama' keeps more .*marks it stateful.* that its config does not describe"
    ):
        require_mixer(llama, is_stateful=True)


def test_a_model_whose_experts_depend_on_the_data_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match="longcat_flash"):
        trace(
            PromptEntry(1, 16, 0),
            ModelSpec(name="x", dtype="float32", config=_longcat()),
            spec_of(reference("llama")).limits,
        )


def _longcat() -> dict[str, Any]:
    sizes = dict.fromkeys(
        ("hidden_size", "ffn_hidden_size", "expert_ffn_hidden_size", "intermediate_size"), 32
    )
    return {"model_type": "longcat_flash", **sizes, "num_layers": 1, "vocab_size": 64, "n_routed_experts": 4}


@pytest.mark.parametrize("architecture", ["deepseek_v3", "deepseek_v4"])
def test_packed_weights_that_were_not_shown_for_a_family_are_refused(architecture: str) -> None:
    spec = spec_of(reference(architecture), quantization="int8")

    with pytest.raises(SpecError, match=f"model.quantization: '{architecture}'"):
        trace(DECODE, spec.model, spec.limits)


def test_numbers_that_are_not_finite_reach_the_models_configuration() -> None:
    config = spec_of(reference("llama")).model.config

    model = build_model({**config, "time_step_limit": [0.0, {"__float__": "Infinity"}]}, "float32")

    assert model.config.time_step_limit == [0.0, float("inf")]


@pytest.mark.parametrize("architecture", [*LATENT, "deepseek_v4"])
def test_every_weight_has_the_dtype_that_transformers_loads_it_in(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = reference(architecture)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()

    ours = build_model(spec_of(model).model.config, "bfloat16").state_dict()

    assert {name: tensor.dtype for name, tensor in ours.items()} == {
        name: tensor.dtype for name, tensor in loaded.items()
    }
    assert (torch.float32 in {tensor.dtype for tensor in ours.values()}) == (architecture != "deepseek_v2")
