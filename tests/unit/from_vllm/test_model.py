from __future__ import annotations

from typing import Any

import pytest

from aotgaudi.bucketing.versions import VERSIONS
from aotgaudi.errors import SpecError
from aotgaudi.from_vllm.model import Device, DtypeName, ModelFacts, kv_block_bytes
from aotgaudi.spec.build_spec import ParallelSpec
from aotgaudi.spec.quantization import QuantizationSpec

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
ONE_DEVICE = ParallelSpec()
FP8 = QuantizationSpec(kv_cache_dtype="fp8_inc")


def device(
    dtype: DtypeName = "bfloat16",
    parallel: ParallelSpec = ONE_DEVICE,
    quantization: QuantizationSpec | None = None,
) -> Device:
    return Device(dtype=dtype, quantization=quantization, parallel=parallel)


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


EIGHT_DEVICES = ParallelSpec(tensor_parallel_size=8)
LATENT = {**LLAMA, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.mark.parametrize(
    ("config", "block_size", "dtype", "parallel", "expected"),
    [
        (LLAMA, 128, "bfloat16", ONE_DEVICE, 128 * 2 * 8 * 128 * 2 * 32),
        (
            {"model_type": "x_vl", "vision_config": {}, "text_config": LLAMA},
            128,
            "float16",
            ONE_DEVICE,
            16 * 2**20,
        ),
        (
            {**LLAMA, "head_dim": 64, "num_key_value_heads": None},
            16,
            "float32",
            ONE_DEVICE,
            16 * 2 * 32 * 64 * 4 * 32,
        ),
        (LATENT, 128, "bfloat16", ONE_DEVICE, 128 * 576 * 2 * 32),
        (LATENT, 128, "bfloat16", EIGHT_DEVICES, 128 * 576 * 2 * 32),
    ],
    ids=["Llama 8B", "multimodal", "a head_dim, no fewer KV heads", "MLA", "MLA on each rank"],
)
def test_bytes_of_a_block(
    config: dict[str, Any], block_size: int, dtype: DtypeName, parallel: ParallelSpec, expected: int
) -> None:
    assert kv_block_bytes(facts(**config), block_size, device(dtype, parallel)) == expected


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_missing_key_is_named_with_the_way_round(name: str) -> None:
    config = {key: value for key, value in LLAMA.items() if key != name}

    with pytest.raises(
        SpecError, match=rf"config\.json: {name}: is missing \(a positive integer, or --num-blocks N\)"
    ):
        kv_block_bytes(facts(**config), 128, device())


@pytest.mark.parametrize("unlike", [{"layer_types": ["mamba", "attention"]}, {"compress_ratios": [0, 4]}])
def test_unlike_layers_are_not_counted(unlike: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"unlike caches \(--num-blocks N\)"):
        kv_block_bytes(facts(**LLAMA, **unlike), 128, device())


@pytest.mark.parametrize(
    ("size", "stages", "quantization", "divisor"),
    [
        (2, 1, None, 2),
        (8, 1, None, 8),
        (16, 1, None, 8),
        (1, 2, None, 2),
        (8, 1, FP8, 16),
        (4, 4, FP8, 32),
    ],
)
def test_a_device_keeps_its_share_of_a_block_and_one_head_at_least(
    size: int, stages: int, quantization: QuantizationSpec | None, divisor: int
) -> None:
    parallel = ParallelSpec(tensor_parallel_size=size, pipeline_parallel_size=stages)

    on_it = device(parallel=parallel, quantization=quantization)

    assert kv_block_bytes(facts(**LLAMA), 128, on_it) * divisor == 16 * 2**20
