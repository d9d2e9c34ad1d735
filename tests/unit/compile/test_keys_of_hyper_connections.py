"""A hyper-connection's program is keyed by all that its graphs follow from."""

from __future__ import annotations

from typing import Any

import pytest

from aotgaudi.digest import Key
from aotgaudi.entries import DecodeEntry, MhcEntry, PromptEntry, StepEntry
from tests.specs import spec_of as spec_with
from tests.unit.compile.test_keys import TARGET, spec_of
from tests.workload import program_key

CONFIG = {
    "model_type": "deepseek_v4",
    "hidden_size": 64,
    "max_position_embeddings": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
}


def key_of(entry: MhcEntry, **config: Any) -> Key:
    return program_key(entry, spec_of({**CONFIG, **config}), TARGET)


BASE = key_of(MhcEntry(64, 2, "attn"))


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("num_tokens", MhcEntry(65, 2, "attn")),
        ("n_splits", MhcEntry(64, 3, "attn")),
        ("sublayer", MhcEntry(64, 2, "ffn")),
    ],
)
def test_every_field_of_an_entry_is_in_it(name: str, other: MhcEntry) -> None:
    assert [row[0] for row in BASE.differences(key_of(other))] == [f"entry.{name}"]


STEPS = (PromptEntry(1, 64, 2), DecodeEntry(4, 1, 8))


@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_keyed_by_its_class_and_by_nothing_else_of_the_rule(step: StepEntry) -> None:
    def key_under(rule: str, num_sms: int) -> Key:
        spec = spec_with(
            config={**CONFIG, "hidden_size": 1024},
            mhc={"rule": rule},
            target={"backend": "cpu", "num_sms": num_sms},
        )
        return program_key(step, spec, TARGET)

    base = key_under("sglang-pr25810", 8)

    assert dict(base.components)["entry.n_splits"] == "8"
    assert [row[0] for row in base.differences(key_under("sglang-pr25810", 4))] == ["entry.n_splits"]
    assert [row[0] for row in base.differences(key_under("one", 8))] == ["entry.n_splits"]
    assert key_under("vllm-collapsed", 9) == key_under("vllm-collapsed", 16)


def test_a_step_without_hyper_connections_has_no_class_in_its_key() -> None:
    llama = spec_of({"model_type": "llama", "hidden_size": 64, "max_position_embeddings": 512})

    for step in STEPS:
        assert "entry.n_splits" not in dict(program_key(step, llama, TARGET).components)
