"""What a config says of hyper-connections; transformers' own configs are the reference."""

from __future__ import annotations

from typing import Any

import pytest

from aotgaudi.errors import SpecError
from aotgaudi.spec.hyper_connections import HyperConnections
from aotgaudi.spec.model import ModelSpec

MARKED = {
    "model_type": "some_later_model",
    "hidden_size": 64,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 7,
    "hc_eps": 1e-5,
    "rms_norm_eps": 1e-4,
}


def of(config: dict[str, Any]) -> HyperConnections | None:
    return HyperConnections.of(ModelSpec(name="m", dtype="float32", config=config))


def test_a_config_with_sinkhorn_iterations_has_them_whatever_its_type() -> None:
    found = of(MARKED)

    assert found == HyperConnections(3, 64, 7, 1e-5, 1e-4)
    assert (found.hc_hidden_size, found.num_mixes) == (192, 15)


def test_the_text_config_of_a_multimodal_model_is_read() -> None:
    assert of({"model_type": "some_vlm", "text_config": MARKED}) == of(MARKED)


@pytest.mark.parametrize("model_type", ["deepseek_v4", "glm5_next_text"])
def test_what_a_config_leaves_out_is_what_transformers_fills_in(model_type: str) -> None:
    from transformers import AutoConfig

    filled = AutoConfig.for_model(model_type, hidden_size=64)

    assert of({"model_type": model_type, "hidden_size": 64}) == HyperConnections(
        filled.hc_mult, 64, filled.hc_sinkhorn_iters, filled.hc_eps, filled.rms_norm_eps
    )


def test_glm5_next_is_recognised_by_its_text_config_and_by_its_own_type() -> None:
    assert of({"model_type": "glm5_next", "text_config": {"hidden_size": 64}}) is not None
    assert (
        of({"model_type": "x", "text_config": {"model_type": "glm5_next_text", "hidden_size": 64}})
        is not None
    )


@pytest.mark.parametrize("model_type", ["hy_v4", "qwen4_exp_text", "llama"])
def test_connections_without_a_sinkhorn_projection_do_not_count(model_type: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type).to_dict()

    assert (
        of(
            {key: value for key, value in config.items() if isinstance(value, int)}
            | {"model_type": model_type}
        )
        is None
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hc_mult", 0),
        ("hc_mult", 65),
        ("hc_mult", True),
        ("hc_mult", None),
        ("hc_sinkhorn_iters", 10**9),
        ("hc_sinkhorn_iters", "20"),
        ("hc_eps", -1e-6),
        ("hc_eps", 1.0),
        ("rms_norm_eps", "1e-6"),
        ("hidden_size", 0),
    ],
)
def test_a_value_that_cannot_be_is_an_error_that_names_it(name: str, value: Any) -> None:
    with pytest.raises(SpecError, match=rf"model\.config\.{name}"):
        of({**MARKED, name: value})
