from __future__ import annotations

from typing import Any

import pytest

from aotgaudi.spec.layer_kinds import layer_kinds

LETTERS = {"r": "rows", "s": "state", "b": "both", "n": "nothing"}


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({"model_type": "llama", "num_hidden_layers": 3}, "rrr"),
        ({"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}, "rr"),
        ({"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "linear_attention", "mamba"]}, "srs"),
        ({"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"]}, "sbs"),
        ({"num_hidden_layers": 6, "hybrid_override_pattern": "M-M*-E"}, "snsrnn"),
        ({"num_hidden_layers": 8, "attn_layer_period": 4, "attn_layer_offset": 1, "mamba_d_conv": 4}, "srsssrss"),
        ({"num_hidden_layers": 6, "attn_layer_indices": [1, 4]}, "srssrs"),
        ({"num_hidden_layers": 8, "linear_num_key_heads": 16}, "sssrsssr"),
        ({"num_hidden_layers": 6, "linear_num_key_heads": 16, "full_attention_interval": 3}, "ssrssr"),
        ({"num_hidden_layers": 7, "block_types": ["recurrent", "recurrent", "attention"]}, "ssrssrs"),
        ({"num_hidden_layers": 5, "full_attn_idxs": [2, 4]}, "ssrsr"),
        ({"num_hidden_layers": 4, "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3]}}, "sssr"),
        ({"num_hidden_layers": 3, "hybrid_layer_ids": [1], "mamba_d_state": 64}, "sbs"),
        ({"num_hidden_layers": 4, "attn_type_list": [0, 1, 0, 1]}, "srsr"),
        ({"num_hidden_layers": 5, "mamba_step": 2, "mamba_d_state": 64}, "srsrs"),
        ({"num_hidden_layers": 2, "block_configs": [{"attention": {"no_op": True}}, {"attention": {}}]}, "nr"),
        ({"num_hidden_layers": 2, "model_type": "falcon_h1", "mamba_d_state": 64}, "bb"),
        ({"num_hidden_layers": 2, "model_type": "falcon_mamba", "state_size": 16}, "ss"),
        ({"num_hidden_layers": 2, "model_type": "new_hybrid", "mamba_d_state": 16}, None),
        ({"num_hidden_layers": 2, "model_type": "zamba", "attn_layer_period": 6, "attn_layer_offset": 4,
          "mamba_d_state": 16}, None),
    ],
)  # fmt: skip
def test_the_layers_of_each_family_as_transformers_has_them(
    config: dict[str, Any], kinds: str | None
) -> None:
    assert layer_kinds(config) == (None if kinds is None else tuple(LETTERS[letter] for letter in kinds))
