"""Whether the scheduler can form a step that no entry covers; the exact answer, without walking all steps.

What the scheduler forms, under the limits (see ``engine/scheduler.py``):

* **Prompt.** A chunk starts at a multiple of `block_size`, ``0 <= start < max_model_len``, after
  ``c = start / block_size`` context blocks. The scheduler may shorten a chunk to the longest covered query
  (whole blocks, unless the chunk ends the sequence) and may put fewer chunks into a step. So after `c` blocks
  it makes progress, whatever is asked, exactly when one row of a whole block is covered there; or of what
  is left of `max_model_len`, at the very end.
* **Decode.** Any batch ``1 .. max_num_seqs`` over any total of blocks, from one a sequence to
  ``min(num_blocks, batch * ceil(max_model_len / block_size))``. A block that several sequences of a step
  share counts once for each, so with sharing the total may exceed `num_blocks`: the scheduler then takes
  fewer sequences into the step until an entry covers it, which one sequence alone always is.

An entry that covers a step covers every smaller one. So of each family of steps that differ in one dimension,
what is uncovered is an interval, from just above the largest covered one to the family's largest: prompts are
two families over the context (a whole block; the rest at the end), decodes one family a batch size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.spec.limits import ServingLimits


@dataclass(frozen=True, slots=True)
class UncoveredSteps:
    """Counterexamples: steps that can be formed and have no entry; an interval of blocks, both ends included.

    Blocks are the context's in a prompt, all sequences' in a decode.
    """

    kind: Literal["prompt", "decode"]
    batch_size: int
    query_len: int
    first_num_blocks: int
    last_num_blocks: int

    def __str__(self) -> str:
        blocks = f"{self.first_num_blocks}"
        if self.last_num_blocks > self.first_num_blocks:
            blocks += f" to {self.last_num_blocks}"
        unit = "context blocks" if self.kind == "prompt" else "blocks"
        return f"{self.kind} of batch size {self.batch_size}, query length {self.query_len}, {blocks} {unit}"


def uncovered(limits: ServingLimits, table: BucketTable) -> Iterator[UncoveredSteps]:
    """Yields the steps that the scheduler can form and `table` does not cover; none: the table is closed."""
    yield from _uncovered_prompts(limits, table)
    yield from _uncovered_decodes(limits, table)


def _uncovered_prompts(limits: ServingLimits, table: BucketTable) -> Iterator[UncoveredSteps]:
    num_whole, rest = divmod(limits.max_model_len, limits.block_size)
    families = [(limits.block_size, 0, num_whole - 1)]
    if rest:
        families.append((rest, num_whole, num_whole))
    for query_len, first, last in families:
        covered = max((e.num_ctx_blocks for e in table.prompt if e.query_len >= query_len), default=-1)
        if covered < last:
            yield UncoveredSteps("prompt", 1, query_len, max(first, covered + 1), last)


def _uncovered_decodes(limits: ServingLimits, table: BucketTable) -> Iterator[UncoveredSteps]:
    largest_first = sorted(table.decode, reverse=True)
    batch_sizes = [entry.batch_size for entry in reversed(largest_first)]
    reach = list(accumulate((entry.num_blocks for entry in largest_first), max))[::-1]
    for batch_size in range(1, min(limits.max_num_seqs, limits.num_blocks) + 1):
        last = min(limits.num_blocks, batch_size * limits.max_blocks_per_seq)
        index = bisect_left(batch_sizes, batch_size)
        covered = reach[index] if index < len(reach) else 0
        if covered < last:
            yield UncoveredSteps("decode", batch_size, 1, max(batch_size, covered + 1), last)
