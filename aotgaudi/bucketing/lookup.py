"""Which entry runs a step: the covering one of least padded cost. Called on every engine step.

This is our own policy. Upstream takes the lexicographically first covering bucket (smallest batch, then query, then
context), which is not the one with least padding. Cost, compared in this order:

======  ==================================  =====================================================
prompt  1. ``batch_size * query_len``       padded tokens: every matrix product of the step
        2. ``batch_size * num_ctx_blocks``  padded context: what attention also reads
        3. the entry itself                 a deterministic choice between equals
decode  1. ``num_blocks``                   what attention reads; it dominates a decode step
        2. ``batch_size``                   padded rows: every matrix product of the step
        3. the entry itself                 a deterministic choice between equals
======  ==================================  =====================================================
"""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from aotgaudi.entries import DecodeEntry, Entry, PromptEntry

T = TypeVar("T")

Size = tuple[int, ...]


class CoverIndex(Generic[T]):
    """Among boxes that are anchored at the origin, finds the best one that contains a point.

    The sizes in each dimension cut space into cells. All points of a cell have the same answer, which is computed once, so a
    look-up is one bisection per dimension. Immutable. `find` takes about a microsecond. Memory is one reference per cell.
    """

    def __init__(
        self, items: Iterable[T], size: Callable[[T], Size], rank: Callable[[T], tuple[int, ...]]
    ) -> None:
        """Indexes `items`. `size` gives an item's box. `rank` orders items, least first. Ties keep their order."""
        ordered = sorted(items, key=rank)
        sizes = [size(item) for item in ordered]
        self._axes = [sorted(set(values)) for values in zip(*sizes, strict=True)]
        lengths = [len(axis) for axis in self._axes]
        self._strides = [math.prod(lengths[index + 1 :]) for index in range(len(lengths))]
        best = _propagated(lengths, self._strides, self._exact(sizes))
        self._cells = [None if index is None else ordered[index] for index in best]

    def find(self, point: Size) -> T | None:
        """Returns the item of least rank whose box contains `point`, or None."""
        if not self._cells:
            return None
        cell = 0
        for axis, stride, value in zip(self._axes, self._strides, point, strict=True):
            index = bisect_left(axis, value)
            if index == len(axis):
                return None
            cell += index * stride
        return self._cells[cell]

    def _exact(self, sizes: list[Size]) -> list[int | None]:
        """Returns, for every cell, the first item whose box ends exactly there."""
        best: list[int | None] = [None] * (math.prod(map(len, self._axes)) if sizes else 0)
        places = [{value: index for index, value in enumerate(axis)} for axis in self._axes]
        for item in reversed(range(len(sizes))):
            indices = (place[value] for place, value in zip(places, sizes[item], strict=True))
            best[sum(map(operator.mul, indices, self._strides))] = item
        return best


def _propagated(lengths: list[int], strides: list[int], best: list[int | None]) -> list[int | None]:
    """Spreads every item to the cells inside its box, downwards along each dimension in turn."""
    for length, stride in zip(lengths, strides, strict=True):
        outer = range(0, len(best), length * stride)
        for start, index, inner in itertools.product(outer, range(length - 2, -1, -1), range(stride)):
            cell = start + index * stride + inner
            best[cell] = _lesser(best[cell], best[cell + stride])
    return best


def _lesser(first: int | None, second: int | None) -> int | None:
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)


@dataclass(frozen=True)
class BucketTable:
    """The prompt and decode entries that are warm. Look-ups take a microsecond. The first one builds an index."""

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
        """Returns the entry for `batch_size` chunks of `query_len` tokens, each after `num_ctx_blocks` blocks."""
        return self._prompt_index.find((batch_size, query_len, num_ctx_blocks))

    def find_decode(self, batch_size: int, num_blocks: int) -> DecodeEntry | None:
        """Returns the entry for one token of each of `batch_size` sequences, over `num_blocks` in all."""
        return self._decode_index.find((batch_size, num_blocks))

    def max_query_len(self, num_ctx_blocks: int, batch_size: int = 1) -> int:
        """Returns the longest query, in tokens, of `batch_size` chunks after a context; 0 if none is possible."""
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
        return CoverIndex(
            self.decode,
            lambda entry: (entry.batch_size, entry.num_blocks),
            lambda entry: (entry.num_blocks, entry.batch_size),
        )

    @cached_property
    def _longest_index(self) -> CoverIndex[PromptEntry]:
        return CoverIndex(
            self.prompt,
            lambda entry: (entry.batch_size, entry.num_ctx_blocks),
            lambda entry: (-entry.query_len, *prompt_cost(entry)),
        )


def prompt_cost(entry: PromptEntry) -> tuple[int, ...]:
    """Returns the cost that `find_prompt` minimises."""
    tokens = entry.batch_size * entry.query_len
    context = entry.batch_size * entry.num_ctx_blocks
    return tokens, context, entry.batch_size, entry.query_len, entry.num_ctx_blocks
