"""How much padding a table costs: mean and worst factor over the steps that can be formed and are covered.

======  ====================================================  ===========================================
phase   a step's own size                                     what its entry computes and reads
======  ====================================================  ===========================================
prompt  longest query of the cell + context blocks * B        batch * (query_len + num_ctx_blocks * B)
decode  blocks                                                num_blocks
======  ====================================================  ===========================================

The factor of a step is the second by the first; the entry is the one that the engine's look-up takes (least padded
cost, ``bucketing/lookup.py``). Every cell, or (batch size, total of blocks), counts once. A cell counts with its
longest query: shorter ones are padded to whole blocks besides.

Method: in one row (one query length; one batch size) the entry changes only at the sizes that entries have, and
between two of them the factors are ``constant / (x + i)`` for consecutive i, whose sum is a difference of two
digamma values. So a row costs as much as it has entries, however many steps there are. Where rows times entries
exceed `MAX_SEGMENTS`, only every k-th row is measured, from the first; the result says so.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import log
from typing import Optional

from aotgaudi.bucketing.lookup import BucketTable, prompt_cost
from aotgaudi.bucketing.reachable import ReachableDecodes, ReachablePrompts
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.spec.limits import ServingLimits

MAX_SEGMENTS = 2**17
"""Rows times distinct sizes up to which every row is measured: some tenths of a second."""

Shape = tuple[int, int, int]
Segment = tuple[int, int]
"""(largest size, what is computed and read) of consecutive sizes that one entry serves."""


@dataclass(frozen=True, slots=True)
class Padding:
    """Padding factors of one phase, 1 or more, over `num_steps` steps in every `row_stride`-th row.

    `worst_step` is the first step of the worst factor: (1, query length, context blocks), or (batch size, 1,
    blocks).
    """

    mean: float
    worst: float
    worst_step: Shape
    num_steps: int
    row_stride: int = 1

    @property
    def is_sampled(self) -> bool:
        """Whether rows were left out."""
        return self.row_stride > 1


def prompt_padding(
    limits: ServingLimits, table: BucketTable, *, max_segments: int = MAX_SEGMENTS
) -> Padding | None:
    """Returns the padding of the covered prompt cells; None where there are none."""
    reachable, lookup = ReachablePrompts(limits), _PromptLookup(table.prompt, limits.block_size)
    stride = _stride(reachable.num_rows * lookup.num_contexts, max_segments)
    return _measured(_prompt_rows(reachable, lookup, stride), stride)


def decode_padding(
    limits: ServingLimits,
    table: BucketTable,
    *,
    contiguous_pa: bool = False,
    max_segments: int = MAX_SEGMENTS,
) -> Padding | None:
    """Returns the padding of the covered decode steps; None where there are none."""
    reachable, widest = ReachableDecodes(limits, contiguous_pa), _widest(table.decode)
    stride = _stride(reachable.max_batch_size * len(widest), max_segments)
    return _measured(_decode_rows(reachable, widest, stride), stride)


@dataclass(frozen=True, slots=True)
class _Row:
    """Steps of the sizes ``unit * (base + i)`` for i in ``first .. last``, and what serves them, by ascending i."""

    unit: int
    base: float
    first: int
    last: int
    segments: Sequence[Segment]
    shape: Shape
    """Of the step, but for its last number, which is i."""

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yields (first, last, padded) of the covered runs of i that one entry serves."""
        start = self.first
        for index in range(bisect_left(self.segments, (start,)), len(self.segments)):
            upper, padded = self.segments[index]
            yield start, min(upper, self.last), padded
            start = upper + 1
            if start > self.last:
                return


def _measured(rows: Iterable[_Row], stride: int) -> Padding | None:
    total, num_steps, worst = 0.0, 0, 0.0
    worst_step: Optional[Shape] = None
    for row in rows:
        for first, last, padded in row.runs():
            count = last - first + 1
            total += padded / row.unit * _sum_of_reciprocals(row.base + first, count)
            num_steps += count
            factor = padded / (row.unit * (row.base + first))
            if factor > worst:
                worst, worst_step = factor, (*row.shape[:2], first)
    return None if worst_step is None else Padding(total / num_steps, worst, worst_step, num_steps, stride)


def _stride(num_segments: int, max_segments: int) -> int:
    return max(1, -(-num_segments // max_segments))


# Prompts: a row is a query length, its sizes are contexts.


def _prompt_rows(reachable: ReachablePrompts, lookup: _PromptLookup, stride: int) -> Iterator[_Row]:
    """Yields every `stride`-th row, by ascending query; the cell that only its shorter queries reach first."""
    size = reachable.limits.block_size
    for number in range(1, reachable.num_rows + 1, stride):
        query_len = reachable.row_query(number)
        full, most = (
            reachable.longest_context(query_len),
            reachable.longest_context(reachable.row_start(number)),
        )
        if most > full:
            shorter = reachable.longest_query(most)
            segments = lookup.segments(shorter, most)
            yield _Row(size, shorter / size, most, most, segments, (1, shorter, most))
        yield _Row(size, query_len / size, 0, full, lookup.segments(query_len, most), (1, query_len, 0))


class _PromptLookup:
    """What `BucketTable.find_prompt` finds for one row, for all contexts at once. Ask by ascending query."""

    def __init__(self, entries: Iterable[PromptEntry], block_size: int) -> None:
        self._block_size = block_size
        self._by_tokens: dict[int, list[PromptEntry]] = defaultdict(list)
        for entry in entries:
            self._by_tokens[entry.batch_size * entry.query_len].append(entry)
        self._tokens = sorted(self._by_tokens)  # What the look-up compares first.
        self._query_lens = sorted({entry.query_len for group in self._by_tokens.values() for entry in group})
        self._last: tuple[int, list[Segment]] = (-1, [])

    @property
    def num_contexts(self) -> int:
        """How many different contexts the entries have."""
        return len({entry.num_ctx_blocks for group in self._by_tokens.values() for entry in group})

    def segments(self, query_len: int, max_ctx_blocks: int) -> list[Segment]:
        """Returns the segments of a query, at least up to `max_ctx_blocks` as far as there are entries."""
        place = bisect_left(self._query_lens, query_len)
        if self._last[0] != place:  # Else the same entries cover it, and its contexts are no longer.
            self._last = (place, list(self._segments(query_len, max_ctx_blocks)))
        return self._last[1]

    def _segments(self, query_len: int, max_ctx_blocks: int) -> Iterator[Segment]:
        reached = -1
        for tokens in self._tokens[bisect_left(self._tokens, query_len) :]:
            entries = [
                e for e in self._by_tokens[tokens] if e.query_len >= query_len and e.num_ctx_blocks > reached
            ]
            for entry, upper in _stairs(entries):
                reached = upper
                yield upper, entry.batch_size * (entry.query_len + entry.num_ctx_blocks * self._block_size)
            if reached >= max_ctx_blocks:
                return


def _stairs(entries: list[PromptEntry]) -> list[tuple[PromptEntry, int]]:
    """Returns the cheapest entry of each context up to the largest: (entry, last context), by ascending context."""
    stairs: list[tuple[PromptEntry, int]] = []
    for entry in sorted(entries, key=lambda entry: (-entry.num_ctx_blocks, *prompt_cost(entry))):
        if not stairs or prompt_cost(entry) < prompt_cost(stairs[-1][0]):
            stairs.append((entry, entry.num_ctx_blocks))
    return stairs[::-1]


# Decodes: a row is a batch size, its sizes are totals of blocks.


def _widest(entries: Iterable[DecodeEntry]) -> list[tuple[int, int]]:
    """Returns (blocks, largest batch size that has an entry of as many), ascending."""
    widest: dict[int, int] = {}
    for entry in entries:
        widest[entry.num_blocks] = max(entry.batch_size, widest.get(entry.num_blocks, 0))
    return sorted(widest.items())


def _decode_rows(reachable: ReachableDecodes, widest: list[tuple[int, int]], stride: int) -> Iterator[_Row]:
    batch_sizes = sorted({batch_size for _, batch_size in widest})
    place, segments = -1, list[Segment]()
    for batch_size in range(1, reachable.max_batch_size + 1, stride):
        if place != bisect_left(batch_sizes, batch_size):
            place = bisect_left(batch_sizes, batch_size)
            segments = [(blocks, blocks) for blocks, largest in widest if largest >= batch_size]
        yield _Row(1, 0.0, batch_size, reachable.most_blocks(batch_size), segments, (batch_size, 1, 0))


def _sum_of_reciprocals(first: float, count: int) -> float:
    """Returns the sum of ``1 / (first + i)`` for i in ``0 .. count - 1``; `first` is positive."""
    if count <= 4:
        return sum(1 / (first + index) for index in range(count))
    return _digamma(first + count) - _digamma(first)


def _digamma(x: float) -> float:
    """Returns the logarithmic derivative of the gamma function; x > 0 (Abramowitz and Stegun 6.3.5 and 6.3.18)."""
    below = 0.0
    while x < 10:
        below += 1 / x
        x += 1
    square = 1 / (x * x)
    series = square * (1 / 12 - square * (1 / 120 - square * (1 / 252 - square / 240)))
    return log(x) - 1 / (2 * x) - series - below
