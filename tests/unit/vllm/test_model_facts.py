from __future__ import annotations

from typing import Any

import pytest

from aotgaudi.bucketing.versions import VERSIONS
from aotgaudi.errors import SpecError
from aotgaudi.vllm.model_facts import ModelFacts


def facts(version: str = "vllm-gaudi@091bbad", **config: Any) -> ModelFacts:
    return ModelFacts.of({"model_type": "llama", **config}, VERSIONS[version].environment)


def test_a_plain_model() -> None:
    found = facts(torch_dtype="float16")

    assert (found.has_mamba, found.has_interleaved_windows, found.has_vision, found.is_quantized) == (
        False,
    ) * 4
    assert (found.mamba_chunk_size, found.mamba_chunk_size_is_explicit) == (0, False)
    assert found.dtype == "float16"


@pytest.mark.parametrize(
    "config",
    [
        {"layers_block_type": ["attention", "mamba"]},
        {"layer_types": ["linear_attention", "full_attention"]},
        {"hybrid_override_pattern": "M-M*-"},
        {"full_attention_interval": 4, "linear_num_key_heads": 16},
        {"model_type": "falcon_mamba"},
        {"model_type": "vl", "text_config": {"layer_types": ["linear_attention"]}},
    ],
)
def test_models_with_recurrent_layers(config: dict[str, Any]) -> None:
    assert facts(**config).has_mamba


@pytest.mark.parametrize(
    ("version", "config", "chunk"),
    [
        ("vllm-gaudi@091bbad", {"mamba_chunk_size": 256}, (256, True)),
        ("vllm-gaudi@091bbad", {"chunk_size": 64}, (64, True)),
        ("vllm-gaudi@091bbad", {}, (128, False)),
        ("vllm-gaudi@v0.17.1", {}, (2048, False)),
        ("vllm-gaudi@v0.17.1", {"chunk_size": 64}, (64, True)),
        ("vllm-gaudi@v0.13.0", {"chunk_size": 64}, (0, False)),
        ("vllm-hpu-extension@8211e0b", {"chunk_size": 64}, (0, False)),
    ],
)
def test_the_chunk_size_by_version(version: str, config: dict[str, Any], chunk: tuple[int, bool]) -> None:
    found = facts(version, layer_types=["mamba"], **config)

    assert (found.mamba_chunk_size, found.mamba_chunk_size_is_explicit) == chunk


def test_a_chunk_size_without_recurrent_layers_is_none() -> None:
    assert facts(chunk_size=64).mamba_chunk_size == 0


@pytest.mark.parametrize("value", [0, -1, 2.5, "64", True])
def test_a_malformed_chunk_size_is_refused(value: Any) -> None:
    with pytest.raises(SpecError, match=r"config.json: has chunk_size .* \(a positive integer\)"):
        facts(layer_types=["mamba"], chunk_size=value)


@pytest.mark.parametrize(
    ("config", "interleaved"),
    [
        ({"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]}, True),
        ({"sliding_window": 512, "layer_types": ["sliding_attention"] * 2}, False),
        ({"sliding_window": None, "layer_types": ["sliding_attention", "full_attention"]}, False),
        ({"sliding_window": 512}, False),
        ({"sliding_window": 512, "sliding_window_pattern": 6}, True),
        ({"sliding_window": 512, "model_type": "gemma2"}, True),
        ({"sliding_window": 512, "use_sliding_window": False, "model_type": "gemma2"}, False),
    ],
)
def test_interleaved_windows(config: dict[str, Any], interleaved: bool) -> None:
    assert facts(**config).has_interleaved_windows is interleaved


def test_vision_and_quantization() -> None:
    assert facts(vision_config={}).has_vision
    assert facts(quantization_config={}).is_quantized


@pytest.mark.parametrize(
    ("config", "dtype"),
    [({}, None), ({"dtype": "bfloat16"}, "bfloat16"), ({"torch_dtype": "torch.float32"}, "float32")],
)
def test_the_dtype(config: dict[str, Any], dtype: str | None) -> None:
    assert facts(**config).dtype == dtype


def test_another_dtype_is_refused() -> None:
    with pytest.raises(SpecError, match="has the dtype 'float8'"):
        _ = facts(dtype="float8").dtype
