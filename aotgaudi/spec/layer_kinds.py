"""What each layer of a model keeps, as its config tells it: rows for each token, a state of fixed size, both, or nothing.

Every family of hybrid models says this in keys of its own. Sources: transformers' ``configuration_<model_type>.py`` (the
defaults of ``layer_types`` and ``layers_block_type``), and ``get_num_layers_by_block_type`` in vllm/config/model.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Optional, TypeGuard

LayerKind = Literal["rows", "state", "both", "nothing"]

_OF_TYPE: Mapping[str, LayerKind] = {
    **dict.fromkeys(
        ("mamba", "mamba2", "gdn_attention", "linear_attention", "conv", "recurrent", "M"), "state"
    ),
    **dict.fromkeys(("mlp", "moe", "-", "E"), "nothing"),
    "hybrid": "both",
}
"""By the type of a layer; the letters are those of Nemotron-H's pattern. All other types attend, and so keep rows."""

_STATE_KEYS = (
    "mamba_d_state",
    "mamba_d_conv",
    "ssm_state_size",
    "state_size",
    "linear_num_key_heads",
    "lru_width",
)
"""Keys that only configs have whose models keep states."""

_EVERY = 4
"""Qwen3-Next's default of ``full_attention_interval``."""


def layer_kinds(text: Mapping[str, Any]) -> tuple[LayerKind, ...] | None:
    """Returns what each layer keeps, for the keys of a language model; None if its layers keep states, but not which.

    A config that tells of no state is one of attention layers.
    """
    num_layers = text["num_hidden_layers"] if _is_positive(text.get("num_hidden_layers")) else None
    for read in _READERS:
        kinds = read(text, num_layers)
        if kinds is not None:
            return kinds[:num_layers]
    if any(text.get(name) is not None for name in _STATE_KEYS) or "mamba" in str(text.get("model_type")):
        return None
    return _all("rows", num_layers or 0)


def keeps_rows(kind: LayerKind) -> bool:
    """Returns whether a layer has keys and values of each token."""
    return kind in ("rows", "both")


Kinds = Optional[tuple[LayerKind, ...]]


def _all(kind: LayerKind, num_layers: int) -> tuple[LayerKind, ...]:
    return (kind,) * num_layers


def _kind(name: Any) -> LayerKind:
    return _OF_TYPE.get(str(name), "rows")


def _listed(text: Mapping[str, Any], _num_layers: int | None) -> Kinds:
    """A type for each layer, or a letter in Nemotron-H's pattern."""
    names = ("layer_types", "layers_block_type", "hybrid_override_pattern")
    listed = next(
        (text[name] for name in names if isinstance(text.get(name), (list, str)) and text[name]), None
    )
    return None if listed is None else tuple(map(_kind, listed))


def _numbered(text: Mapping[str, Any], _num_layers: int | None) -> Kinds:
    """MiniMax: 1 for attention, 0 for linear attention."""
    numbers = text.get("attn_type_list")
    return tuple("rows" if one == 1 else "state" for one in numbers) if isinstance(numbers, list) else None


def _repeated(text: Mapping[str, Any], num_layers: int | None) -> Kinds:
    """RecurrentGemma: types that repeat."""
    types = text.get("block_types")
    if not isinstance(types, list) or not types or num_layers is None:
        return None
    return tuple(_kind(types[layer % len(types)]) for layer in range(num_layers))


def _without_attention(text: Mapping[str, Any], _num_layers: int | None) -> Kinds:
    """Llama-Nemotron: blocks whose attention is left out."""
    blocks = text.get("block_configs")
    if not isinstance(blocks, list):
        return None
    attention = [block.get("attention") if isinstance(block, dict) else None for block in blocks]
    return tuple("nothing" if isinstance(one, dict) and one.get("no_op") else "rows" for one in attention)


def _all_alike(text: Mapping[str, Any], num_layers: int | None) -> Kinds:
    """Falcon-H1: each layer attends and has a Mamba mixer. Models of Mamba alone: no layer attends."""
    model_type = str(text.get("model_type"))
    if num_layers is None:
        return None
    if model_type == "falcon_h1":
        return _all("both", num_layers)
    return _all("state", num_layers) if model_type in ("mamba", "mamba2", "falcon_mamba") else None


def _chosen(text: Mapping[str, Any], num_layers: int | None) -> Kinds:
    """Families that name their attention layers by index, or by a rule for the index. The others keep states."""
    if num_layers is None:
        return None
    for kind, attends in _rules(text, num_layers):
        return tuple(kind if attends(layer) else "state" for layer in range(num_layers))
    return None


def _rules(text: Mapping[str, Any], num_layers: int) -> Iterator[tuple[LayerKind, Callable[[int], bool]]]:
    """Yields what the attention layers keep, and which layers they are."""
    kimi = text.get("linear_attn_config")
    lists: tuple[tuple[LayerKind, Any, int], ...] = (
        ("rows", text.get("attn_layer_indices"), 0),  # Bamba
        ("rows", text.get("full_attn_idxs"), 0),  # LFM2
        ("rows", kimi.get("full_attn_layers") if isinstance(kimi, dict) else None, 1),  # Kimi Linear
        ("both", text.get("hybrid_layer_ids"), 0),  # Zamba2
    )
    for kind, indices, first in lists:
        if isinstance(indices, list):
            yield kind, {index - first for index in indices if type(index) is int}.__contains__
    period, offset = text.get("attn_layer_period"), text.get("attn_layer_offset")
    if _is_positive(period) and type(offset) is int and text.get("model_type") != "zamba":  # Jamba
        yield "rows", lambda layer: layer % period == offset
    every = text.get("full_attention_interval", _EVERY)
    if text.get("linear_num_key_heads") is not None and _is_positive(every):  # Qwen3-Next
        yield "rows", lambda layer: (layer + 1) % every == 0
    step = text.get("mamba_step")
    if _is_positive(step):  # PLaMo 2
        middle = step // 2
        yield (
            "rows",
            lambda layer: layer == num_layers - 1 if num_layers <= middle else layer % step == middle,
        )


def _is_positive(value: Any) -> TypeGuard[int]:
    return type(value) is int and value > 0


_READERS = (_listed, _numbered, _repeated, _without_attention, _all_alike, _chosen)
