"""Rows of blocks: what each layer keeps, by its config."""

from __future__ import annotations

from fractions import Fraction
from math import lcm
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.errors import SpecError
from aotgaudi.spec.cache_rows import (
    CacheRows,
    Compression,
    Rows,
    compressions_of,
    family_of,
    require_block_size,
    rows_missing,
    rows_of,
)
from aotgaudi.spec.model import ModelSpec

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}
COMPRESSED = {
    **LLAMA,
    "model_type": "deepseek_v4",
    "num_key_value_heads": 1,
    "head_dim": 512,
    "sliding_window": 128,
    "index_head_dim": 128,
    "index_topk": 512,
    "compress_ratios": [0, 4, 128, 0],
}
LATENT = {**LLAMA, "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}

EVERY = st.integers(1, 256)
KINDS = st.builds(Rows, every=EVERY | st.none(), reach=st.none() | st.integers(1, 10_000))
CACHES = st.builds(
    CacheRows,
    layer=st.integers(0, 200),
    planes=st.integers(1, 3),
    heads=st.integers(1, 16),
    width=st.integers(1, 1024),
    part=st.sampled_from(["", "raw", "index"]),
    rows=st.lists(KINDS, min_size=1, max_size=3).map(tuple),
)


def model_of(config: dict[str, Any], **changes: Any) -> ModelSpec:
    return ModelSpec(name="m", dtype="bfloat16", config={**config, **changes})


def test_attention_keeps_a_key_and_a_value_for_each_token_and_kv_head() -> None:
    model = model_of(LLAMA)

    assert family_of(model) == "uniform"
    assert rows_of(model) == tuple(CacheRows(layer, planes=2, heads=2, width=8) for layer in range(3))


def test_latent_attention_keeps_one_row_a_token_however_many_heads_there_are() -> None:
    model = model_of(LATENT)

    assert family_of(model) == "latent"
    assert rows_of(model) == tuple(CacheRows(layer, planes=1, heads=1, width=576) for layer in range(3))


def test_compressed_attention_keeps_tokens_entries_and_what_entries_are_made_of() -> None:
    """As published: ratios by layer, of which there is one more than layers."""
    model = model_of(COMPRESSED)
    token = Rows(reach=128)

    assert family_of(model) == "compressed"
    assert rows_missing(model) is None
    assert rows_of(model) == (
        CacheRows(0, 1, 1, 512, rows=(token,)),
        CacheRows(1, 1, 1, 512, rows=(token, Rows(every=4))),
        CacheRows(1, 1, 1, 2 * 2 * (512 + 128), "raw", rows=(Rows(reach=8),), dtype="float32"),
        CacheRows(1, 1, 1, 128, "index", rows=(Rows(every=4),)),
        CacheRows(2, 1, 1, 512, rows=(token, Rows(every=128))),
        CacheRows(2, 1, 1, 2 * 512, "raw", rows=(Rows(reach=128),), dtype="float32"),
    )
    assert [cache.rows_per_block(128) for cache in rows_of(model)] == [128, 160, 128, 32, 129, 128]


def test_types_and_rates_of_layers_say_the_same_as_published_ratios() -> None:
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    rates = {"compressed_sparse_attention": 8, "heavily_compressed_attention": 64}

    model = model_of(COMPRESSED, compress_ratios=None, layer_types=kinds, compress_rates=rates)

    assert compressions_of(model) == (None, Compression(8, 16, True, 128), Compression(64, 64, False, 128))
    assert [cache.name for cache in rows_of(model)] == ["0", "1", "1.raw", "1.index", "2", "2.raw"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": [0, 4]}, r"layer_types: has 2 layers of 3"),
        ({"compress_ratios": [0, 4, 32]}, r"layer_types: a layer is 'compressed by 32'"),
        (
            {"compress_rates": {"compressed_sparse_attention": 0}},
            r"compress_rates\.compressed_sparse_attention: is 0",
        ),
        ({"sliding_window": None}, "sliding_window"),
    ],
)
def test_a_layer_of_which_nothing_is_known_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        rows_of(model_of(COMPRESSED, **changes))


def test_the_language_models_part_of_a_config_decides() -> None:
    nested = {"model_type": "vl", "text_config": LATENT}

    assert rows_of(model_of(nested)) == rows_of(model_of(LATENT))


def test_rows_of_a_layer_with_a_window_are_read_as_far_back_as_the_window() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]

    rows = rows_of(model_of(LLAMA, sliding_window=20, layer_types=kinds))

    assert [cache.rows for cache in rows] == [(Rows(reach=20),), (Rows(),), (Rows(reach=20),)]


def test_a_window_of_no_layer_in_particular_says_nothing_about_reach() -> None:
    assert rows_of(model_of(LLAMA, sliding_window=20)) == rows_of(model_of(LLAMA))


@pytest.mark.parametrize(
    ("changes", "reaches"),
    [
        ({"model_type": "mistral"}, [20, 20, 20]),
        ({"model_type": "gemma2"}, [20, None, 20]),
        ({"model_type": "gpt_oss", "layer_types": ["full_attention"] * 3}, [None, None, None]),
        ({"model_type": "gemma3_text"}, [20, 20, 20]),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 3}, [20, 20, None]),
        ({"model_type": "mistral", "sliding_window": None}, [None, None, None]),
    ],
)
def test_the_layers_that_a_model_type_reads_through_a_window_are_known(
    changes: dict[str, Any], reaches: list[int | None]
) -> None:
    rows = rows_of(model_of({**LLAMA, "sliding_window": 20}, **changes))

    assert [cache.reach for cache in rows] == reaches


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss", "cohere2", "olmo3", "gemma3_text", "mistral"])
def test_these_layers_are_those_of_transformers(model_type: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, num_hidden_layers=13, sliding_window=64)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * 13

    rows = rows_of(model_of(LLAMA, model_type=model_type, num_hidden_layers=13, sliding_window=64))

    assert [cache.reach is not None for cache in rows] == [kind == "sliding_attention" for kind in types]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear attention"),
        ({"layer_types": ["conv", "full_attention"]}, "convolutions"),
        ({"kv_lora_rank": 512, "index_topk": 2048}, "indexer"),
        ({"layer_types": ["indexed_attention"] * 3}, "indexer"),
    ],
)
def test_what_no_row_describes_is_named(changes: dict[str, Any], what: str) -> None:
    assert what in str(rows_missing(model_of(LLAMA, **changes)))
    assert rows_missing(model_of(LLAMA)) is None
    assert rows_missing(model_of(LATENT)) is None


@pytest.mark.parametrize("absent", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_size_that_the_config_lacks_is_an_error_that_names_it(absent: str) -> None:
    config = {name: value for name, value in LLAMA.items() if name != absent}

    with pytest.raises(SpecError, match=absent):
        rows_of(model_of(config))


@pytest.mark.parametrize("size", ["planes", "heads", "width"])
def test_a_cache_without_an_extent_is_refused(size: str) -> None:
    with pytest.raises(SpecError, match=rf"cache 3\.raw: {size}: is 0"):
        CacheRows(**{"layer": 3, "part": "raw", "planes": 1, "heads": 1, "width": 1, size: 0})


def test_a_row_stands_for_at_least_one_token() -> None:
    with pytest.raises(SpecError, match=r"rows\.every: is 0"):
        Rows(every=0)


@given(CACHES, st.integers(1, 512))
def test_a_block_has_room_for_all_its_rows_and_no_more(cache: CacheRows, block_size: int) -> None:
    """Property: of each kind, as many rows as there are groups of `every` tokens, begun ones included."""
    wanted = sum(
        1 if kind.every is None else len({token // kind.every for token in range(block_size)})
        for kind in cache.rows
    )

    assert cache.rows_per_block(block_size) == wanted
    assert cache.values_per_block(block_size) == cache.planes * cache.heads * cache.width * wanted


@given(CACHES, st.integers(1, 512))
def test_where_blocks_are_accepted_no_row_crosses_their_end(cache: CacheRows, block_size: int) -> None:
    """Property: an accepted block holds exactly its share of rows; the smallest multiple of all kinds is accepted."""
    shares = [Fraction(block_size, kind.every) for kind in cache.rows if kind.every is not None]
    whole = all(share.denominator == 1 for share in shares)

    if whole:
        require_block_size([cache], block_size)
        assert cache.rows_per_block(block_size) == sum(shares) + len(cache.rows) - len(shares)
    else:
        with pytest.raises(
            SpecError, match=rf"limits\.block_size: is {block_size}; cache {cache.name} has a row"
        ):
            require_block_size([cache], block_size)
    require_block_size([cache], lcm(*(kind.every or 1 for kind in cache.rows)))


@given(st.lists(CACHES, max_size=8, unique_by=lambda cache: (cache.layer, cache.part)))
def test_names_tell_all_caches_apart(caches: list[CacheRows]) -> None:
    assert len({cache.name for cache in caches}) == len(caches)
