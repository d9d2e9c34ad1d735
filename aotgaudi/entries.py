"""Entries: the shapes that must be warm, as hashable, ordered values.

There is one class for each kind of entry. ``columns`` is the order in which a manifest stores the fields. An entry's id is
the xxh3-128 of its canonical JSON. It is short and fast, and nothing trusts it (sha256 names what is trusted).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Union

import xxhash

from aotgaudi.digest import Scalar, canonical_row
from aotgaudi.spec.sampler_signature import SamplerSignature, signature_of


@dataclass(frozen=True, slots=True, order=True)
class _Row:
    kind: ClassVar[str]
    __match_args__: ClassVar[tuple[str, ...]]

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """The field names, in stored order."""
        return cls.__match_args__

    def row(self) -> tuple[Scalar, ...]:
        """The field values, in stored order."""
        return tuple([getattr(self, name) for name in self.__match_args__])

    @property
    def id(self) -> str:
        """xxh3-128 of the canonical JSON of ``[kind, *row]``, 32 hex digits."""
        return xxhash.xxh3_128_hexdigest(canonical_row((self.kind, *self.row())).encode())

    def __str__(self) -> str:
        """The kind and the values, without trailing defaults."""
        values = list(self.row())
        defaults = [field.default for field in fields(self)]
        while values and values[-1] == defaults[len(values) - 1]:
            values.pop()
        return f"({', '.join([self.kind, *map(str, values)])})"


@dataclass(frozen=True, slots=True, order=True)
class _Step(_Row):
    batch_size: int
    query_len: int

    @property
    def num_tokens(self) -> int:
        """The tokens that a step computes, including padding."""
        return self.batch_size * self.query_len


@dataclass(frozen=True, slots=True, order=True)
class PromptEntry(_Step):
    """A prefill step: `batch_size` sequences of `query_len` tokens, each after `num_ctx_blocks` blocks."""

    kind: ClassVar[str] = "prompt"
    num_ctx_blocks: int


@dataclass(frozen=True, slots=True, order=True)
class DecodeEntry(_Step):
    """A decode step: one token for each of `batch_size` sequences, over `num_blocks` KV blocks in all."""

    kind: ClassVar[str] = "decode"
    num_blocks: int


@dataclass(frozen=True, slots=True, order=True)
class UnifiedEntry(_Row):
    """A unified-attention step: `query_len` tokens of any sequences, over shared and unique KV blocks.

    `is_causal`: some of its queries belong to prompts. vllm-gaudi v0.11.2 to v0.17.1 have such steps.
    """

    kind: ClassVar[str] = "unified"
    query_len: int
    num_shared_blocks: int
    num_unique_blocks: int
    is_causal: bool


@dataclass(frozen=True, slots=True, order=True)
class VisionEntry(_Row):
    """A run of the vision tower, over `size` images if `is_batch`, else over `size` patches."""

    kind: ClassVar[str] = "vision"
    size: int
    is_batch: bool


@dataclass(frozen=True, slots=True, order=True)
class SamplerEntry(_Row):
    """Sampling of `batch_size` rows with one setting. `batch_changed`: the batch has a new composition.

    The fields from `min_p` on default to "off". `num_logprobs` is the number of log-probabilities returned per row. A stored
    row ends after `num_logprobs`, or after the last later field that is not off.
    """

    kind: ClassVar[str] = "sampler"
    batch_size: int
    temperature: float
    top_p: float
    top_k: int
    batch_changed: bool
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    num_logprobs: int = 0
    constraints: bool = False
    top_n_sigma: float = 0.0

    num_always_stored: ClassVar[int] = 10

    @property
    def signature(self) -> SamplerSignature:
        """The sampler graph of this entry."""
        return signature_of(self, logprobs=self.num_logprobs > 0, constraints=self.constraints)

    def row(self) -> tuple[Scalar, ...]:
        """The field values, in stored order. Omits the last ones if off, so that entries without them keep their ids."""
        values = _Row.row(self)
        while len(values) > self.num_always_stored and not values[-1]:
            values = values[:-1]
        return values


@dataclass(frozen=True, slots=True, order=True)
class DefragEntry(_Row):
    """A KV-cache defragmentation: `padded_swaps` pairs of blocks are exchanged in every layer."""

    kind: ClassVar[str] = "defrag"
    padded_swaps: int


@dataclass(frozen=True, slots=True, order=True)
class MhcEntry(_Row):
    """A hyper-connection around one sublayer (``attn`` or ``ffn``), for `num_tokens` tokens in `n_splits` partial sums."""

    kind: ClassVar[str] = "mhc"
    num_tokens: int
    n_splits: int
    sublayer: str


Entry = Union[PromptEntry, DecodeEntry, UnifiedEntry, VisionEntry, SamplerEntry, DefragEntry, MhcEntry]
StepEntry = Union[PromptEntry, DecodeEntry]
"""A step of our own engine."""

ENTRY_KINDS: dict[str, type[Entry]] = {
    cls.kind: cls
    for cls in (PromptEntry, DecodeEntry, UnifiedEntry, VisionEntry, SamplerEntry, DefragEntry, MhcEntry)
}
