"""What a spec may say of quantization, and what becomes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aotgaudi.backends.offline import build_target
from aotgaudi.errors import SpecError
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import parse_spec, spec_from_json
from tests import specs
from tests.unit.spec.test_parallel import LLAMA_70B


def spec_of(quantization: Any, config: dict[str, Any] = LLAMA_70B, **model: Any) -> BuildSpec:
    model = {"name": "m", "dtype": "bfloat16", "config": config, "quantization": quantization, **model}
    return specs.spec_of(model=model, target={"backend": "fake"})


def test_the_name_of_a_dtype_stands_for_its_table() -> None:
    spec = spec_of("int8")

    assert spec == spec_of({"weights": "int8"})
    assert spec.model.weights_dtype == "int8"
    assert spec.to_json()["model"]["quantization"]["weights"] == "int8"
    assert spec_from_json(spec.to_json()) == spec
    assert spec_of(None).model.weights_dtype is None
    assert build_target(spec).backend == "fake"


def test_programs_over_rounded_weights_have_other_keys_and_vllms_tables_keep_theirs() -> None:
    names = [name for name, _ in spec_of("int8").model.signature().components]
    of_vllm = [name for name, _ in spec_of({"method": "inc"}).model.signature().components]

    assert "model.quantization.weights" in names
    assert "model.quantization.weights" not in of_vllm
    assert "weights" not in spec_of({"method": "inc"}).to_json()["model"]["quantization"]


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ("int4", """model.quantization: is 'int4' (should be "int8", or a table of vLLM's)"""),
        ("INT8", """model.quantization: is 'INT8' (should be "int8", or a table of vLLM's)"""),
        ("", """model.quantization: is '' (should be "int8", or a table of vLLM's)"""),
        (8, "model.quantization: is 8 (should be "),
        ({}, "model.quantization: is empty (weights"),
        ({"weights": "int4"}, "model.quantization.weights: is 'int4' (should be 'int8')"),
        ({"kv_cache_dtype": "int4"}, "model.quantization.kv_cache_dtype: is 'int4'"),
        ({"config_sha256": "x"}, "model.quantization.config_sha256: is 'x'"),
        ({"methods": "inc"}, "model.quantization.methods: unknown key (did you mean 'method'?)"),
        ({"wieghts": "int8"}, "model.quantization.wieghts: unknown key (did you mean 'weights'?)"),
        ({"weights": "int8", "method": "inc"}, "model.quantization.weights: is our own server's, and"),
        (
            {"weights": "int8", "kv_cache_dtype": "fp8"},
            "model.quantization.weights: is our own server's, and",
        ),
    ],
)
def test_what_is_wrong_is_one_line(quantization: Any, expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec_of(quantization)

    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


def test_a_spec_in_toml_names_it() -> None:
    text = """
        schema = "aotgaudi.spec/1"
        limits.max_num_seqs = 1
        limits.max_num_batched_tokens = 16
        limits.max_model_len = 64
        limits.block_size = 16
        limits.num_blocks = 8
        [model]
        name = "m"
        dtype = "bfloat16"
        quantization = "%s"
        config = { model_type = "llama", max_position_embeddings = 512 }
    """

    assert parse_spec(text % "int8", Path()).model.weights_dtype == "int8"
    with pytest.raises(SpecError, match="is 'int3'"):
        parse_spec(text % "int3", Path())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"quantization_config": {"quant_method": "awq"}},
            "model.quantization.weights: is 'int8', and the checkpoint is quantized already (config.json has a",
        ),
        (
            {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
            "model.quantization.weights: is 'int8', and the checkpoint is quantized already (config.json has a",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(config: dict[str, Any], expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        build_target(spec_of("int8", {**LLAMA_70B, **config}))

    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)
