"""Which entry runs a step: the covering one of least padded cost. Called on every engine step.

This is a policy of ours. Upstream takes the lexicographically first covering bucket (smallest batch, then
query, then context), which is not the one with least padding. Cost, compared in this order:

======  ==================================  =====================================================
prompt  1. ``batch_size * query_len``       padded tokens: every matrix product of the step
        2. ``batch_size * num_ctx_blocks``  padded context: what attention reads besides
        3. the entry itself                 a deterministic choice between equals
decode  1. ``num_blocks``                   what attention reads; it dominates a decode step
        2. ``batch_size``                   padded rows: every matrix product of the step
        3. the entry itself                 a deterministic choice between equals
======  ==================================  =====================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from aotgaudi.bucketing.cover import CoverIndex
from aotgaudi.entries import DecodeEntry, Entry, PromptEntry


@dataclass(frozen=True)
class BucketTable:
    """The prompt and decode entries that are warm. Look-ups take a microsecond; the first builds an index."""

    prompt: tuple[PromptEntry, ...]
    decode: tuple[DecodeEntry, ...]

    @classmethod
    def from_entries(cls, entries: Iterable[Entry]) -> BucketTable:
        """Returns the table of the prompt and decode entries among `entries`."""
        rows = tuple(entries)
        return cls(
            prompt=tuple(row for row in rows if isinstance(row, PromptEntry)),
            decode=tuple(row for row in rows if isinstance(row, DecodeEntry)),
        )

    def find_prompt(self, batch_size: int, query_len: int, num_ctx_blocks: int) -> PromptEntry | None:
        """Returns the entry for `batch_size` chunks of `query_len` tokens, each after `num_ctx_blocks`."""
        return self._prompt_index.find((batch_size, query_len, num_ctx_blocks))

    def find_decode(self, batch_size: int, num_blocks: int) -> DecodeEntry | None:
        """Returns the entry for one token of each of `batch_size` sequences, over `num_blocks` in all."""
        return self._decode_index.find((batch_size, num_blocks))

    def max_query_len(self, num_ctx_blocks: int, batch_size: int = 1) -> int:
        """Returns the longest query, in tokens, that `batch_size` chunks after a context may have, or 0."""
        longest = self._longest_index.find((batch_size, num_ctx_blocks))
        return 0 if longest is None else longest.query_len

    @cached_property
    def _prompt_index(self) -> CoverIndex[PromptEntry]:
        return CoverIndex(
            self.prompt,
            lambda entry: (entry.batch_size, entry.query_len, entry.num_ctx_blocks),
            prompt_cost,
        )

    @cached_property
    def _decode_index(self) -> CoverIndex[DecodeEntry]:
        return CoverIndex(self.decode, lambda entry: (entry.batch_size, entry.num_blocks), decode_cost)

    @cached_property
    def _longest_index(self) -> CoverIndex[PromptEntry]:
        return CoverIndex(
            self.prompt,
            lambda entry: (entry.batch_size, entry.num_ctx_blocks),
            lambda entry: (-entry.query_len, *prompt_cost(entry)),
        )


def prompt_cost(entry: PromptEntry) -> tuple[int, ...]:
    """Returns what `find_prompt` minimises."""
    tokens = entry.batch_size * entry.query_len
    context = entry.batch_size * entry.num_ctx_blocks
    return tokens, context, entry.batch_size, entry.query_len, entry.num_ctx_blocks


def decode_cost(entry: DecodeEntry) -> tuple[int, ...]:
    """Returns what `find_decode` minimises."""
    return entry.num_blocks, entry.batch_size
