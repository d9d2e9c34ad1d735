"""What a model's layers keep for a sequence: rows of the blocks that the sequence has anyway. Imports no torch.

A layer has one or more caches, each one tensor::

    [planes, num_blocks + 1, heads, rows a block, width]        block 0 is padding

A kind of row stands for one token, for several, or for a whole block. One block table, one pool and one prefix cache serve
every model, because nothing outside this module and the graphs knows what a block holds. Known are

* ``uniform``: keys and values of attention, two planes, a row for each token and KV head;
* ``latent``: multi-head latent attention, one plane and one head. A token's row is its compressed keys and values
  (``kv_lora_rank``), then the key's rotated part (``qk_rope_head_dim``);
* ``compressed``: DeepSeek V4, one plane and one head, keys that are values too. Every layer has a row a token, read through
  a window. Layers with a compressor add an *entry* for every r tokens, in the same cache.
  They keep in ``raw`` what entries are made of: values and gates of each token, in float32. Where an indexer chooses among
  entries, an entry is made of 2r tokens in two series, ``index`` has its key, and ``raw`` what keys are made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from pydantic import JsonValue

from aotgaudi.errors import SpecError
from aotgaudi.spec.model import ModelSpec

Family = Literal["uniform", "latent", "compressed"]
"""Models that keep the same kinds of rows, and so have one mixer."""

CONFIG_KEYS = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "sliding_window",
    "layer_types",
    "index_topk",
    "index_head_dim",
    "compress_rates",
    "compress_ratios",
)
"""What is read of a config here. Where a config leaves one out, transformers' default decides."""

_SLIDING, _SPARSE, _HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
_OF_RATIO = MappingProxyType({0: _SLIDING, 4: _SPARSE, 128: _HEAVY})
"""The type of layer that a published config's ``compress_ratios`` mean, layer by layer. It may have more than there are."""

_ALL_IN_WINDOW = frozenset({"mistral", "mixtral", "starcoder2"})
"""Model types whose layers all read through the config's window, if it has one: their configs have no types of layers.
Other configs name a window that their models do not use."""

_FULL_EVERY: Mapping[str, int] = MappingProxyType(
    {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "olmo3": 4, "gemma3": 6, "gemma3_text": 6}
)
"""Model types whose layers read through the config's window, all but every so many-th. transformers fills this in where a
config has no types of layers."""

_OTHER_STATE: Mapping[str, str] = MappingProxyType(
    {
        "linear_attention": "the recurrent state of its linear attention",
        "conv": "the inputs of its convolutions",
        "mamba": "the state of its Mamba layers",
        "hybrid": "the state of its Mamba layers",
        "recurrent": "a recurrent state",
        "indexed_attention": "the keys of its indexer",
    }
)
"""Types of layers that keep something for which there is no kind of row."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A kind of row. One stands for `every` tokens, None: for a whole block.

    `reach`: how many tokens back from the newest it is still read, itself included; None: always.
    """

    every: int | None = 1
    reach: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("every", self.every), ("reach", self.reach)):
            if value is not None and value < 1:
                raise SpecError(f"rows.{name}", f"is {value}", "a positive number of tokens, or None")

    def per_block(self, block_size: int) -> int:
        """Returns the rows of a block, a last one that is not full included."""
        return 1 if self.every is None else -(-block_size // self.every)


@dataclass(frozen=True, slots=True)
class CacheRows:
    """The rows of one of a layer's caches. `part` tells several caches apart; the first has none.

    A block has the rows of each kind one after the other. `dtype`: None means the model's.
    """

    layer: int
    planes: int
    heads: int
    width: int
    part: str = ""
    rows: tuple[Rows, ...] = field(default=(Rows(),))
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("planes", "heads", "width"):
            if getattr(self, name) < 1:
                raise SpecError(f"cache {self.name}: {name}", f"is {getattr(self, name)}", "at least 1")
        if not self.rows:
            raise SpecError(f"cache {self.name}: rows", "is empty", "at least one kind of row")

    @property
    def name(self) -> str:
        """``<layer>``, or ``<layer>.<part>``."""
        return f"{self.layer}.{self.part}" if self.part else str(self.layer)

    @property
    def reach(self) -> int | None:
        """How many tokens back from the newest one of its rows is still read, itself included; None: one always is."""
        reaches = [kind.reach for kind in self.rows]
        return (
            max((reach for reach in reaches if reach is not None), default=None)
            if None not in reaches
            else None
        )

    def rows_per_block(self, block_size: int) -> int:
        """Returns the rows of all kinds in a block."""
        return sum(kind.per_block(block_size) for kind in self.rows)

    def values_per_block(self, block_size: int) -> int:
        """Returns the numbers in a block, of all planes and heads."""
        return self.planes * self.heads * self.rows_per_block(block_size) * self.width


@dataclass(frozen=True, slots=True)
class Compression:
    """How a layer makes entries: one for `every` tokens, of the last `num_read` tokens up to its last.

    `is_indexed`: an indexer chooses among them; otherwise a query sees all. `window`: how many tokens back the layer reads
    tokens themselves.
    """

    every: int
    num_read: int
    is_indexed: bool
    window: int


def family_of(model: ModelSpec) -> Family:
    """Returns the family whose rows the model keeps, as far as its config says."""
    if _makes_entries(model):
        return "compressed"
    return "uniform" if model.latent_dim is None else "latent"


def rows_of(model: ModelSpec) -> tuple[CacheRows, ...]:
    """Returns the rows of each layer, in the layers' order. Raises SpecError for a size that the config lacks."""
    if family_of(model) == "compressed":
        return tuple(
            cache
            for layer, compression in enumerate(compressions_of(model))
            for cache in _compressed(layer, compression, model)
        )
    latent_dim, windows = model.latent_dim, _windows(model)
    planes, heads, width = (
        (2, model.num_kv_heads, model.head_dim) if latent_dim is None else (1, 1, latent_dim)
    )
    return tuple(
        CacheRows(layer, planes, heads, width, rows=(Rows(reach=windows.get(layer)),))
        for layer in range(model.num_layers)
    )


def compressions_of(model: ModelSpec) -> tuple[Compression | None, ...]:
    """Returns how each layer of a compressed model makes entries; None where it has tokens only.

    Raises SpecError for a layer of unknown type.
    """
    types = _layer_types(model) or tuple(map(_type_of_ratio, _list_of(model, "compress_ratios")))
    if len(types) < model.num_layers:
        raise SpecError(
            "model.config.layer_types",
            f"has {len(types)} layers of {model.num_layers}",
            "a type for each layer, or compress_ratios",
        )
    return tuple(_compression(model, kind) for kind in types[: model.num_layers])


def _type_of_ratio(ratio: object) -> str:
    return _OF_RATIO.get(ratio, f"compressed by {ratio}") if isinstance(ratio, int) else str(ratio)


def _compression(model: ModelSpec, kind: str) -> Compression | None:
    if kind == _SLIDING:
        return None
    if kind not in (_SPARSE, _HEAVY):
        known = f"{_SLIDING}, {_SPARSE} or {_HEAVY}"
        raise SpecError("model.config.layer_types", f"a layer is {kind!r}, which is not known", known)
    rates = model.config_value("compress_rates")
    published = next(ratio for ratio, name in _OF_RATIO.items() if name == kind)
    every = rates.get(kind, published) if isinstance(rates, dict) else published
    if type(every) is not int or every < 1:
        raise SpecError(f"model.config.compress_rates.{kind}", f"is {every!r}", "a positive integer")
    is_indexed = kind == _SPARSE
    return Compression(every, 2 * every if is_indexed else every, is_indexed, model.sliding_window)


def _compressed(layer: int, compression: Compression | None, model: ModelSpec) -> Iterator[CacheRows]:
    width, tokens = model.head_dim, Rows(reach=model.sliding_window)
    if compression is None:
        yield CacheRows(layer, 1, 1, width, rows=(tokens,))
        return
    entries = Rows(every=compression.every)
    yield CacheRows(layer, 1, 1, width, rows=(tokens, entries))
    series = 2 if compression.is_indexed else 1
    made = width + (model.index_head_dim if compression.is_indexed else 0)
    raw = Rows(reach=compression.num_read)
    yield CacheRows(layer, 1, 1, 2 * series * made, part="raw", rows=(raw,), dtype="float32")
    if compression.is_indexed:
        yield CacheRows(layer, 1, 1, model.index_head_dim, part="index", rows=(entries,))


def rows_missing(model: ModelSpec) -> str | None:
    """Returns what the model keeps that no kind of row describes, as a phrase; None if the config tells of nothing."""
    types = _layer_types(model)
    found = next((what for name, what in _OTHER_STATE.items() if name in types), None)
    if found is None and model.states("index_topk") and not _makes_entries(model):
        return _OTHER_STATE["indexed_attention"]
    return found


def require_block_size(caches: Iterable[CacheRows], block_size: int) -> None:
    """Raises SpecError if a block of `block_size` tokens would end inside a row."""
    for cache in caches:
        for kind in cache.rows:
            if kind.every is not None and block_size % kind.every:
                raise SpecError(
                    "limits.block_size",
                    f"is {block_size}; cache {cache.name} has a row for every {kind.every} tokens",
                    f"a multiple of {kind.every}",
                )


def _makes_entries(model: ModelSpec) -> bool:
    return model.states("compress_rates") or model.states("compress_ratios")


def _layer_types(model: ModelSpec) -> tuple[str, ...]:
    return tuple(map(str, _list_of(model, "layer_types")))


def _list_of(model: ModelSpec, name: str) -> list[JsonValue]:
    values = model.config_value(name)
    return values if isinstance(values, list) else []


def _windows(model: ModelSpec) -> dict[int, int]:
    """Returns the window of each layer that the config says is read through one. Of the others all is read, always."""
    window = model.config_value("sliding_window")
    if type(window) is not int or window < 1:
        return {}
    model_type = str(model.config_value("model_type"))
    if model_type in _ALL_IN_WINDOW:
        return dict.fromkeys(range(model.num_layers), window)
    if not _layer_types(model) and model_type in _FULL_EVERY:
        pattern = model.config_value("sliding_window_pattern")
        every = pattern if type(pattern) is int and pattern > 0 else _FULL_EVERY[model_type]
        return {layer: window for layer in range(model.num_layers) if (layer + 1) % every}
    return {layer: window for layer, kind in enumerate(_layer_types(model)) if kind == _SLIDING}
