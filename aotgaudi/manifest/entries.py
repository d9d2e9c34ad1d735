"""Entries: the things that must be warm. Pure values, hashable and ordered.

One class a kind. ``columns`` is the order in which a manifest stores the fields. An entry's id is the
xxh3-128 of its canonical JSON: short, fast, and not trusted for anything (sha256 names what is trusted).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import ClassVar, Union

import xxhash

from aotgaudi.digest import canonical_json


@dataclass(frozen=True, slots=True, order=True)
class _Row:
    kind: ClassVar[str]

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """The field names, in stored order."""
        return tuple(field.name for field in fields(cls))

    def row(self) -> tuple[int | float | bool, ...]:
        """The field values, in stored order."""
        return astuple(self)

    @property
    def id(self) -> str:
        """xxh3-128 of the canonical JSON of ``[kind, *row]``, 32 hex digits."""
        return xxhash.xxh3_128_hexdigest(canonical_json([self.kind, *self.row()]))

    def __str__(self) -> str:
        return f"({', '.join([self.kind, *map(str, self.row())])})"


@dataclass(frozen=True, slots=True, order=True)
class PromptEntry(_Row):
    """A prefill step: `batch_size` sequences of `query_len` tokens, each after `num_ctx_blocks` blocks."""

    kind: ClassVar[str] = "prompt"
    batch_size: int
    query_len: int
    num_ctx_blocks: int


@dataclass(frozen=True, slots=True, order=True)
class DecodeEntry(_Row):
    """A decode step: one token for each of `batch_size` sequences, flat over `num_blocks` KV blocks."""

    kind: ClassVar[str] = "decode"
    batch_size: int
    query_len: int
    num_blocks: int


@dataclass(frozen=True, slots=True, order=True)
class SamplerEntry(_Row):
    """Sampling for `batch_size` rows under one setting; `batch_changed`: the batch's composition is new."""

    kind: ClassVar[str] = "sampler"
    batch_size: int
    temperature: float
    top_p: float
    top_k: int
    batch_changed: bool


@dataclass(frozen=True, slots=True, order=True)
class DefragEntry(_Row):
    """A KV-cache defragmentation: `padded_swaps` pairs of blocks are exchanged in every layer."""

    kind: ClassVar[str] = "defrag"
    padded_swaps: int


Entry = Union[PromptEntry, DecodeEntry, SamplerEntry, DefragEntry]
ENTRY_KINDS: dict[str, type[Entry]] = {
    cls.kind: cls for cls in (PromptEntry, DecodeEntry, SamplerEntry, DefragEntry)
}
