"""A hyper-connection's program is keyed by all that its graphs follow from."""

from __future__ import annotations

from typing import Any

import pytest

from aotgaudi.digest import Key
from aotgaudi.entries import MhcEntry
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


@pytest.mark.parametrize("name", ["hc_mult", "hc_sinkhorn_iters", "hc_eps", "rms_norm_eps", "hidden_size"])
def test_every_constant_of_the_graphs_is_in_it(name: str) -> None:
    other = key_of(MhcEntry(64, 2, "attn"), **{name: 2 * CONFIG[name]})

    assert [row[0] for row in BASE.differences(other)] == [f"model.model.config.{name}"]
