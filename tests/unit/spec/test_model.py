from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.errors import SpecError
from aotgaudi.spec.model import CONFIG_KEYS_EXCLUDED, ModelSpec

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}


def model(*, dtype: Any = "float32", name: str = "m", **config: Any) -> ModelSpec:
    return ModelSpec(name=name, dtype=dtype, config={**CONFIG, **config})


def test_properties_read_hugging_face_names() -> None:
    read = model()

    assert (read.num_layers, read.hidden_size, read.vocab_size) == (2, 64, 512)
    assert (read.max_position_embeddings, read.model_type) == (128, "llama")


def test_properties_fall_back_to_the_nested_text_config() -> None:
    nested = ModelSpec(name="m", dtype="float32", config={"model_type": "vlm", "text_config": CONFIG})

    assert (nested.num_layers, nested.hidden_size, nested.vocab_size) == (2, 64, 512)


@pytest.mark.parametrize("value", [None, 0, -1, True, "2", 2.0])
def test_a_count_that_is_not_a_positive_integer_is_an_error_that_names_it(value: Any) -> None:
    with pytest.raises(SpecError, match=r"model\.config\.num_hidden_layers"):
        _ = model(num_hidden_layers=value).num_layers


@given(st.text(min_size=1), st.integers(0, 9))
def test_every_key_is_in_the_signature_unless_it_is_excluded_by_name(key: str, value: int) -> None:
    changed = ModelSpec(name="m", dtype="float32", config={**CONFIG, f"x{key}": value}).signature()

    assert changed.hex != model().signature().hex
    assert len(changed.differences(model().signature())) == 1


@pytest.mark.parametrize("key", CONFIG_KEYS_EXCLUDED)
def test_an_excluded_key_changes_no_signature_and_says_why(key: str) -> None:
    changed = ModelSpec(name="m", dtype="float32", config={**CONFIG, key: "anything"})
    assert changed.signature() == model().signature()
    assert model(text_config={key: 1}).signature() == model(text_config={}).signature()
    assert len(CONFIG_KEYS_EXCLUDED[key]) > 10


def test_the_padding_token_is_in_the_signature() -> None:
    """It is an argument of the embedding's node in the graph."""
    assert model(pad_token_id=2).signature() != model().signature()


def test_dtype_is_in_the_signature_and_the_name_is_not() -> None:
    assert model(dtype="bfloat16").signature() != model().signature()
    assert model(name="other").signature() == model().signature()


def test_order_of_keys_and_spelling_of_numbers_do_not_matter() -> None:
    turned = ModelSpec(name="m", dtype="float32", config=dict(reversed({**CONFIG, "x": 1.0}.items())))

    assert turned.signature() == model(x=1).signature()


def test_a_difference_inside_the_text_config_is_named() -> None:
    first, second = model(text_config={"a": 1}).signature(), model(text_config={"a": 2}).signature()

    assert first.differences(second) == (("model.config.text_config.a", "1", "2"),)


@pytest.mark.parametrize(
    ("config", "positions"),
    [({"n_positions": 8192}, 8192), ({"max_position_embeddings": 4096, "seq_length": 2048}, 2048)],
)
def test_positions_go_by_several_names(config: dict[str, Any], positions: int) -> None:
    model = ModelSpec(name="m", dtype="bfloat16", config={"model_type": "gpt_bigcode", **config})

    assert model.max_position_embeddings == positions


def test_a_model_without_positions_is_told_the_usual_name() -> None:
    model = ModelSpec(name="m", dtype="bfloat16", config={"model_type": "x"})

    with pytest.raises(SpecError, match=r"model\.config\.max_position_embeddings: is missing"):
        _ = model.max_position_embeddings


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mamba", "state_size": 16},
        {"model_type": "rwkv", "attention_hidden_size": 768},
        {"model_type": "recurrent_gemma", "lru_width": 2560},
    ],
)
def test_a_model_with_other_state_is_told_that_it_is_not_supported(config: dict[str, Any]) -> None:
    model = ModelSpec(name="m", dtype="bfloat16", config=config)

    with pytest.raises(SpecError, match=r"model_type: is '.*keys and values of attention: not supported"):
        _ = model.max_position_embeddings
