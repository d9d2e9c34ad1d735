"""The steps that a scheduler can form under the limits: sizes and counts by arithmetic, without walking the steps.

Here B is `block_size`, T `max_num_batched_tokens`, M `max_model_len`, N `num_blocks`, S `max_num_seqs`. Queries and contexts
are those of one sequence, and a context counts in whole blocks. ``bucketing.speculation`` has the decode steps of several
tokens per sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from aotgaudi.spec.bucketing import BucketingSpec
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.scheduler import SchedulerSpec

Contexts = Literal["any", "blocks", "none"]
"""What may precede a chunk of a prompt: any number of tokens, cached whole blocks, or nothing."""


@dataclass(frozen=True, slots=True, order=True)
class Counterexample:
    """One step that can be formed and has no entry. The smallest is that of fewest tokens.

    `num_tokens`: how many tokens the step computes and reads. `shape` is that of the smallest entry that would cover the
    step: (1, query length, context blocks) or (batch size, 1, blocks); for a sampler (rows,), for a defrag (swaps,).
    """

    num_tokens: int
    kind: str
    shape: tuple[int, ...]
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class ReachablePrompts:
    """One chunk of ``1 <= query <= T`` tokens after ``context >= 0`` tokens, ``query + context <= M``.

    Chunks of prompts start after `contexts` of any length. Whole prompts start after whole cached blocks, or after
    nothing without prefix caching. KV blocks from elsewhere end after any token.

    A **cell** is a pair (row, context blocks). Row k, counted from 1, contains the queries of ``(k - 1) * B + 1 .. k * B``
    tokens. A cell exists if some query of its row is possible after some context of that many blocks.
    """

    limits: ServingLimits
    contexts: Contexts = "any"

    @classmethod
    def of(
        cls, limits: ServingLimits, bucketing: BucketingSpec, scheduler: SchedulerSpec
    ) -> ReachablePrompts:
        """Returns the prompts that `scheduler` can form. Our own always cuts prompts into chunks."""
        if scheduler.engine == "aotgaudi" or scheduler.chunked_prefill or scheduler.kv_transfer:
            return cls(limits)
        return cls(limits, "blocks" if bucketing.prefix_caching else "none")

    @property
    def max_ctx_blocks(self) -> int:
        """The most blocks of a context that leaves room for one more token."""
        return self.longest_context(1)

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return self.row_of(self.longest_query(0))

    @property
    def num_cells(self) -> int:
        """The number of cells."""
        return self.cells_after(0, self.max_ctx_blocks)

    def row_of(self, query_len: int) -> int:
        """Returns the row of a query."""
        return _ceil(query_len, self.limits.block_size)

    def row_query(self, row: int) -> int:
        """Returns the longest query of a row, in tokens: whole blocks, or T or M in the last row."""
        return min(row * self.limits.block_size, self.longest_query(0))

    def row_start(self, row: int) -> int:
        """Returns the shortest query of a row, in tokens."""
        return (row - 1) * self.limits.block_size + 1

    def shortest_context(self, num_ctx_blocks: int) -> int:
        """Returns the fewest tokens in `num_ctx_blocks` of context. If ``any``, the last block may be partly full."""
        if self.contexts == "any" and num_ctx_blocks:
            return (num_ctx_blocks - 1) * self.limits.block_size + 1
        return num_ctx_blocks * self.limits.block_size

    def longest_query(self, num_ctx_blocks: int) -> int:
        """Returns the longest query, in tokens, after a context of `num_ctx_blocks`."""
        room = self.limits.max_model_len - self.shortest_context(num_ctx_blocks)
        return min(self.limits.max_num_batched_tokens, room)

    def longest_context(self, query_len: int) -> int:
        """Returns the most blocks of context that a query of 1 .. `longest_query(0)` tokens can have."""
        if self.contexts == "none":
            return 0
        room = self.limits.max_model_len - query_len
        return (
            _ceil(room, self.limits.block_size) if self.contexts == "any" else room // self.limits.block_size
        )

    def cells_after(self, first: int, last: int) -> int:
        """Returns the number of cells after `first` to `last` context blocks."""
        longest = self.row_start(self.num_rows)
        falls = self.longest_context(longest) + 1  # From here on each further block costs a row.
        return sum_linear(lambda ctx: self.row_of(self.longest_query(ctx)), first, last, (1, falls))

    def cells_in_rows(self, num_rows: int, first: int, last: int) -> int:
        """Returns the number of cells in rows 1 to `num_rows`, after `first` to `last` context blocks."""
        rows, last = min(num_rows, self.num_rows), min(last, self.max_ctx_blocks)
        if rows < 1 or first > last:
            return 0
        whole = min(
            last, self.longest_context(self.row_start(rows))
        )  # Up to here all of these rows are there.
        rest = self.cells_after(max(first, whole + 1), last) if whole < last else 0
        return max(0, whole - first + 1) * rows + rest


@dataclass(frozen=True, slots=True)
class ReachableDecodes:
    """One token for each of ``1 .. min(S, N)`` sequences, over any total of blocks that they can have.

    They have at least one block per sequence, and at most ``min(N, batch_size * ceil(M / B))``. Under `contiguous_pa` the
    total is the highest block id in use, up to N for any batch.
    """

    limits: ServingLimits
    contiguous_pa: bool = False

    @property
    def max_batch_size(self) -> int:
        """The most sequences of a step."""
        return min(self.limits.max_num_seqs, self.limits.num_blocks)

    @property
    def num_steps(self) -> int:
        """The number of pairs (batch size, total of blocks)."""
        return self.steps_above(0, 1, self.max_batch_size)

    def most_blocks(self, batch_size: int) -> int:
        """Returns the largest total of a batch."""
        own = batch_size * self.limits.max_blocks_per_seq
        return self.limits.num_blocks if self.contiguous_pa else min(self.limits.num_blocks, own)

    def smallest_batch(self, num_blocks: int) -> int:
        """Returns the smallest batch whose total can be 1 .. N blocks."""
        return 1 if self.contiguous_pa else _ceil(num_blocks, self.limits.max_blocks_per_seq)

    def steps_above(self, num_blocks: int, first: int, last: int) -> int:
        """Returns the number of steps of more than `num_blocks`, in batches of `first` to `last` sequences."""
        if num_blocks >= self.most_blocks(last):
            return 0
        first = max(first, self.smallest_batch(num_blocks + 1))
        full = self.smallest_batch(self.limits.num_blocks)
        return sum_linear(
            lambda batch: self.most_blocks(batch) - max(num_blocks, batch - 1),
            first,
            last,
            (full, num_blocks + 1),
        )


def sum_linear(value: Callable[[int], int], first: int, last: int, cuts: Iterable[int]) -> int:
    """Returns the sum of `value` over `first` to `last`. `value` is linear from each cut up to the next."""
    edges = sorted({first, last + 1, *(cut for cut in cuts if first < cut <= last)})
    return sum((b - a) * (value(a) + value(b - 1)) // 2 for a, b in pairwise(edges))


def span(first: int, last: int) -> str:
    """Returns a range of numbers as text, or the only number: ``3``, ``3 to 2,048``."""
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _ceil(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
