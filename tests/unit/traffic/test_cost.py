from __future__ import annotations

from pathlib import Path
from typing import Any

from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.spec.parse import load_spec
from aotgaudi.traffic.cost import DEVICES, WorkModel
from tests.specs import spec_of

MANIFESTS = Path(__file__).parents[3] / "manifests"
LATENT = {
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
}


def test_latent_attention_costs_what_its_rows_say_whatever_the_width_of_a_head() -> None:
    works = [_work({**LATENT, "head_dim": head_dim}) for head_dim in (8, 64)]

    assert works[0] == works[1]
    assert works[0].per_pair == 2 * 4 * 2 * (40 + 32)
    assert works[0].per_key == 2 * 40 * 4 * DEVICES["cpu"].balance
    projections = 64 * 4 * 24 + 64 * 40 + 4 * (32 * 36 + 20 * 64)
    assert works[0].per_token == 2 * 2 * (projections + 3 * 64 * 96)


def test_entries_of_several_tokens_cost_a_part_of_a_pair_each() -> None:
    model = load_spec(MANIFESTS / "tiny-v4.cpu.toml").model
    work = _work(model.config)

    rows = 16 + (16 + 4) + (16 + 1)  # Of a block: tokens, then entries.
    assert work.per_pair == 2 * 4 * (2 * 32 * rows // 16)
    read = 32 * (16 + 20 + 17) + 16 * 4  # Rows of the layers, and keys of the indexer.
    assert work.per_key == -(-read * 4 // 16) * DEVICES["cpu"].balance


def test_work_is_that_of_rows_tokens_pairs_and_keys() -> None:
    work = WorkModel(
        block_size=16, per_row=1000, per_token=100, per_pair=10, per_key=1, per_second=1e3, step_seconds=0.5
    )

    assert work.work(PromptEntry(2, 32, 3)) == 2 * (1000 + 32 * 100 + 32 * (48 + 32) * 10 + 48)
    assert work.work(DecodeEntry(4, 1, 5)) == 4 * 1100 + 5 * 16 * 11
    assert work.seconds(DecodeEntry(1, 1, 1)) == 0.5 + (1100 + 16 * 11) / 1e3


def _work(config: dict[str, Any]) -> WorkModel:
    spec = spec_of(model={"name": "m", "dtype": "float32", "config": config})
    return WorkModel.of(spec, DEVICES["cpu"])
