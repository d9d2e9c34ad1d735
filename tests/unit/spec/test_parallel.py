from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aotgaudi.backends.offline import build_target
from aotgaudi.errors import SpecError
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import parse_spec, spec_from_json
from tests import specs

LLAMA_70B = {
    "model_type": "llama",
    "max_position_embeddings": 512,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}


def spec_of(config: dict[str, Any] = LLAMA_70B, **tables: Any) -> BuildSpec:
    model = {"name": "m", "dtype": "bfloat16", "config": config, **tables.pop("model", {})}
    return specs.spec_of(model=model, **tables)


@pytest.mark.parametrize(
    ("size", "heads_of_rank", "kv_heads_of_rank"), [(1, 64, 8), (2, 32, 4), (8, 8, 1), (16, 4, 1), (64, 1, 1)]
)
def test_a_rank_has_its_share_of_the_heads_and_one_kv_head_at_least(
    size: int, heads_of_rank: int, kv_heads_of_rank: int
) -> None:
    parallel = spec_of(parallel={"tensor_parallel_size": size}).parallel

    assert parallel.share_of_rank(64) == heads_of_rank
    assert parallel.kv_heads_of_rank(8) == kv_heads_of_rank
    assert parallel.world_size == size


@pytest.mark.parametrize(("stages", "layers"), [(1, 80), (3, 27), (8, 10), (80, 1)])
def test_the_stage_with_most_layers_counts(stages: int, layers: int) -> None:
    parallel = spec_of(parallel={"pipeline_parallel_size": stages, "tensor_parallel_size": 2}).parallel

    assert (parallel.layers_of_rank(80), parallel.world_size) == (layers, 2 * stages)


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        (
            {"tensor_parallel_size": 3},
            "tensor_parallel_size: is 3 (a divisor of the model's 64 attention heads)",
        ),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: is 0"),
        ({"data_parallel_size": 2}, "data_parallel_size: is 2, with engine 'aotgaudi'"),
        ({"pipeline_parallel_size": 81}, "pipeline_parallel_size: is 81 (at most the model's 80 layers)"),
        ({"tensor_parallel": 2}, "tensor_parallel: unknown key (did you mean 'tensor_parallel_size'?)"),
    ],
)
def test_what_cannot_be_spread_is_refused(parallel: dict[str, Any], expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec_of(parallel=parallel)

    assert str(caught.value).startswith(f"parallel.{expected}")


def test_kv_heads_are_split_or_copied_but_not_both() -> None:
    with pytest.raises(SpecError, match="a divisor or a multiple of the model's 3 key and value heads"):
        spec_of(
            {**LLAMA_70B, "num_attention_heads": 6, "num_key_value_heads": 3},
            parallel={"tensor_parallel_size": 2},
        )


def test_a_config_without_heads_can_be_spread_all_the_same() -> None:
    config = {"model_type": "gpt_bigcode", "max_position_embeddings": 512}

    assert spec_of(config, parallel={"tensor_parallel_size": 3}).parallel.world_size == 3


@pytest.mark.process
def test_replicas_in_lockstep_are_enumerated_and_not_built() -> None:
    spec = spec_of(
        parallel={"data_parallel_size": 2},
        scheduler={"engine": "vllm"},
        limits={"max_model_len": 256, "max_num_batched_tokens": 128},
    )

    assert spec.to_json()["parallel"]["data_parallel_size"] == 2
    with pytest.raises(SpecError, match="data_parallel_size: is 2, which the cpu backend cannot build"):
        build_target(spec)


def test_only_vllm_gets_kv_blocks_from_elsewhere() -> None:
    with pytest.raises(SpecError, match="kv_transfer"):
        spec_of(scheduler={"kv_transfer": True})

    assert "kv_transfer" not in spec_of(scheduler={"engine": "vllm"}).to_json()["scheduler"]


def test_what_a_spec_does_not_use_is_absent_from_its_json() -> None:
    """Else every manifest id and key from before these fields would be another."""
    json = spec_of().to_json()

    assert {"parallel", "lora"}.isdisjoint(json)
    assert "quantization" not in json["model"]
    assert "allow_long_max_model_len" not in json["limits"]
    assert spec_of(parallel={"tensor_parallel_size": 1}) == spec_of()
    assert spec_of(parallel={"tensor_parallel_size": 1}).to_json() == json


def test_what_a_spec_uses_is_in_its_json_whole_and_comes_back() -> None:
    spec = spec_of(
        parallel={"tensor_parallel_size": 8},
        lora={"max_loras": 4},
        model={"quantization": {"method": "inc"}},
        limits={"max_model_len": 384, "allow_long_max_model_len": True},
    )
    json = spec.to_json()

    assert json["parallel"] == {
        "tensor_parallel_size": 8,
        "pipeline_parallel_size": 1,
        "expert_parallel": False,
    }
    assert json["lora"]["max_lora_rank"] == 16
    assert json["model"]["quantization"] == {"method": "inc", "kv_cache_dtype": "auto", "config_sha256": None}
    assert spec_from_json(json) == spec


@pytest.mark.parametrize("rank", [0, 2, 24, 1024])
def test_a_rank_of_adapters_is_one_of_vllms(rank: int) -> None:
    with pytest.raises(SpecError, match=r"lora\.max_lora_rank"):
        spec_of(lora={"max_lora_rank": rank})


def quantized_text(config: str) -> str:
    return f"""
schema = "aotgaudi.spec/1"
limits = {{ max_num_seqs = 1, max_num_batched_tokens = 16, max_model_len = 16, block_size = 16, num_blocks = 1 }}
[model]
name = "m"
dtype = "bfloat16"
config = {{ model_type = "llama", max_position_embeddings = 512 }}
quantization = {{ method = "inc", config = {config} }}
"""


def test_a_quantizations_config_is_known_by_its_content(tmp_path: Path) -> None:
    digests = []
    for name, text in {
        "a": '{"mode": "QUANTIZE", "x": 1}',
        "b": '{"x":1,\n"mode":"QUANTIZE"}',
        "c": "{}",
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        quantization = parse_spec(quantized_text(f'"{name}"'), tmp_path).model.quantization
        assert quantization is not None
        digests.append(quantization.config_sha256)

    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ('"absent.json"', "cannot be read: No such file"),
        ('"bad.json"', "is not JSON"),
        ("3", "is 3 (the path of the file that QUANT_CONFIG names)"),
    ],
)
def test_a_quantizations_config_that_cannot_be_read_is_named(
    tmp_path: Path, config: str, problem: str
) -> None:
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")

    with pytest.raises(SpecError) as caught:
        parse_spec(quantized_text(config), tmp_path)

    assert str(caught.value).startswith("model.quantization.config: ")
    assert problem in str(caught.value)
