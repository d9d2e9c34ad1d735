"""What a model's layers keep for a sequence: rows of the blocks that the sequence has anyway. Imports no torch.

A layer has one or more caches, each one tensor::

    [planes, num_blocks + 1, heads, rows a block, width]        block 0 is padding

A kind of row stands for one token, for several, or for a whole block. One block table, one pool and one prefix cache serve
every model, because nothing outside this module and the graphs knows what a block holds. Known are

* ``uniform``: keys and values of attention, two planes, a row for each token and KV head;
* ``latent``: multi-head latent attention, one plane and one head. A token's row is its compressed keys and values
  (``kv_lora_rank``), then the key's rotated part (``qk_rope_head_dim``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from aotgaudi.errors import SpecError
from aotgaudi.spec.model import ModelSpec

Family = Literal["uniform", "latent"]
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
    "compress_rates",
    "compress_ratios",
)
"""What is read of a config here. Where a config leaves one out, transformers' default decides."""

_SLIDING = "sliding_attention"
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

    def rows_per_block(self, block_size: int) -> int:
        """Returns the rows of all kinds in a block."""
        return sum(kind.per_block(block_size) for kind in self.rows)

    def values_per_block(self, block_size: int) -> int:
        """Returns the numbers in a block, of all planes and heads."""
        return self.planes * self.heads * self.rows_per_block(block_size) * self.width


def family_of(model: ModelSpec) -> Family:
    """Returns the family whose rows the model keeps, as far as its config says."""
    return "uniform" if model.latent_dim is None else "latent"


def rows_of(model: ModelSpec) -> tuple[CacheRows, ...]:
    """Returns the rows of each layer, in the layers' order. Raises SpecError for a size that the config lacks."""
    latent_dim, windows = model.latent_dim, _windows(model)
    planes, heads, width = (
        (2, model.num_kv_heads, model.head_dim) if latent_dim is None else (1, 1, latent_dim)
    )
    return tuple(
        CacheRows(layer, planes, heads, width, rows=(Rows(reach=windows.get(layer)),))
        for layer in range(model.num_layers)
    )


def rows_missing(model: ModelSpec) -> str | None:
    """Returns what the model keeps that no kind of row describes, as a phrase; None if the config tells of nothing."""
    if model.states("compress_rates") or model.states("compress_ratios"):
        return "entries that stand for several tokens, and the rows that they are made of"
    types = _layer_types(model)
    found = next((what for name, what in _OTHER_STATE.items() if name in types), None)
    if found is None and model.states("index_topk"):
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


def _layer_types(model: ModelSpec) -> tuple[str, ...]:
    types = model.config_value("layer_types")
    return tuple(map(str, types)) if isinstance(types, list) else ()


def _windows(model: ModelSpec) -> dict[int, int]:
    """Returns the window of each layer that the config says is read through one. Of the others all is read, always."""
    window = model.config_value("sliding_window")
    if type(window) is not int or window < 1:
        return {}
    return {layer: window for layer, kind in enumerate(_layer_types(model)) if kind == _SLIDING}
