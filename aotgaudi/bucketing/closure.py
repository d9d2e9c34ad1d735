"""The fewest entries that close a table: what ``coverage = "closed"`` adds.

An added prompt entry has batch size 1 and the query length of a row (whole blocks; T or M in the last one). It is
*admissible* for the uncovered cells of a row when it is at least as long as the row and at most `max_padding` times
as long. Every uncovered cell gets an entry that is admissible for it; each entry has as much context as its
cells need.

**Why none can be spared.** Whether an entry can be admissible for a cell depends on the cell's row alone, and its
context can be chosen freely, so this is covering points on a line (the rows with holes) by intervals of a fixed
ratio. From the longest row down, the longest one that is left must get an entry; the one of exactly its length
reaches as far down as any. The first rows so chosen are the **witnesses**: no entry is admissible for two of
them, since each is more than `max_padding` times as long as the next. So there are as many witnesses as entries,
and no solution has fewer.

Decodes need at most one entry, of the largest batch and the largest total that are uncovered; a single uncovered
decode is its witness. Steps of speculative decoding need the very graphs that they run, which are all added; each is
its own witness.

The rows with holes after one `PromptHole`'s contexts are an interval, so the search is over holes, not over rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Union

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.proof import DecodeHole, PromptHole, ReachableSteps, decode_holes, prompt_holes
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.spec.bucketing import BucketingSpec

AddedEntry = Union[PromptEntry, DecodeEntry]


@dataclass(frozen=True, slots=True)
class Addition:
    """An entry, and an uncovered step that is why it is there: no other added entry is admissible for it.

    `witness` is that step's exact shape: batch size, query length, (context) blocks.
    """

    entry: AddedEntry
    witness: tuple[int, int, int]


def closing_entries(
    steps: ReachableSteps, bucketing: BucketingSpec, table: BucketTable
) -> tuple[AddedEntry, ...]:
    """Returns the entries that `bucketing` asks to add to `table`: ascending prompts, then decodes.

    None with ``coverage = "upstream"``, and none to a unified table, of which nothing is proved.
    """
    if bucketing.coverage == "upstream" or bucketing.strategy == "unified":
        return ()
    added = tuple(addition.entry for addition in close(steps, bucketing.max_padding, table))
    decodes = (*table.decode, *(entry for entry in added if isinstance(entry, DecodeEntry)))
    return (*added, *steps.speculative.closing_entries(decodes))


def close(steps: ReachableSteps, max_padding: float, table: BucketTable) -> tuple[Addition, ...]:
    """Returns the fewest additions to `table` that leave no hole in prompts and decodes. None of them is in it."""
    prompts = tuple(prompt_holes(steps.prompts, table))
    decodes = tuple(decode_holes(steps.decodes, table))
    ratio = Fraction(str(max_padding))  # As it was written: five times 1.2 is 6.
    return (*reversed(list(_prompt_additions(prompts, ratio))), *_decode_additions(decodes))


def _prompt_additions(holes: Sequence[PromptHole], max_padding: Fraction) -> Iterator[Addition]:
    """Yields the additions from the longest row down."""
    open_holes = [_OpenHole.of(hole) for hole in holes]
    while open_holes:
        row = max(hole.last_row for hole in open_holes)
        reachable = open_holes[0].hole.reachable
        query_len = reachable.row_query(row)
        shortest = min(row, ceil(query_len / max_padding / reachable.limits.block_size))
        witness = max(hole.cell(row) for hole in open_holes if hole.last_row == row)
        contexts = [hole.most_context(shortest) for hole in open_holes if hole.last_row >= shortest]
        yield Addition(PromptEntry(1, query_len, max(contexts)), (1, *witness))
        open_holes = [hole.below(shortest) for hole in open_holes if hole.first_row < shortest]


@dataclass(frozen=True, slots=True)
class _OpenHole:
    """A hole's rows that have no entry yet, ``first_row .. last_row``."""

    hole: PromptHole
    first_row: int
    last_row: int

    @classmethod
    def of(cls, hole: PromptHole) -> _OpenHole:
        longest = hole.reachable.longest_query(hole.first_ctx_blocks)
        first_row = hole.covered_len // hole.reachable.limits.block_size + 1
        return cls(hole, first_row, hole.reachable.row_of(longest))

    def most_context(self, row: int) -> int:
        """Returns the most context blocks of an uncovered cell in `row` or a longer one."""
        start = self.hole.reachable.row_start(max(row, self.first_row))
        return min(self.hole.last_ctx_blocks, self.hole.reachable.longest_context(start))

    def cell(self, row: int) -> tuple[int, int]:
        """Returns the longest query of the uncovered cell of most context in `row`, and its context."""
        reachable, context = self.hole.reachable, self.most_context(row)
        return min(reachable.row_query(row), reachable.longest_query(context)), context

    def below(self, row: int) -> _OpenHole:
        """Returns what is left of it when `row` and the longer ones have their entries."""
        return _OpenHole(self.hole, self.first_row, min(self.last_row, row - 1))


def _decode_additions(holes: Sequence[DecodeHole]) -> Iterator[Addition]:
    if not holes:
        return
    smallest, largest = holes[0], holes[-1]  # By ascending batch size; no smaller batch has more blocks.
    most = largest.reachable.most_blocks(largest.last_batch_size)
    yield Addition(
        DecodeEntry(largest.last_batch_size, 1, most), (smallest.first_batch_size, 1, smallest.fewest_blocks)
    )
