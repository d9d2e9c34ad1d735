"""Decides how prompts are cut into chunks, and which chunks share a step. Pure functions of numbers of tokens.

A chunk takes as many known tokens as fit the rest of the step and an entry. Unless it reaches the last known token, it ends
at the end of a block. While others decode, it is cut to fit the step's time budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from aotgaudi.engine.blocks import num_blocks_for
from aotgaudi.engine.interleaving import StepCosts
from aotgaudi.engine.request import Request
from aotgaudi.engine.steps import StepTable
from aotgaudi.entries import PromptEntry
from aotgaudi.spec.limits import ServingLimits

Seconds = float


@dataclass(frozen=True, slots=True)
class Chunk:
    """`num_tokens` known tokens of a request from `start` on; 0 if no entry covers even one."""

    request: Request
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        """The position of the first token after the chunk."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Chunker:
    """Cuts prompts for the entries of `table`."""

    limits: ServingLimits
    table: StepTable
    costs: StepCosts

    def longest(self, request: Request, start: int, num_left: int) -> Chunk:
        """Returns the longest chunk from `start` on that one entry covers, with at most `num_left` tokens."""
        remaining = request.num_tokens - start
        end = start + min(remaining, num_left, self.table.max_query_len(self._num_blocks(start)))
        if end < request.num_tokens:
            end = max(start, end - end % self.limits.block_size)
        return Chunk(request, start, end - start)

    def covers_rest(self, request: Request, start: int) -> bool:
        """Returns whether entries cover all known tokens from `start` on, chunk by chunk."""
        while start < request.num_tokens:
            chunk = self.longest(request, start, self.limits.max_num_batched_tokens)
            if not chunk.num_tokens:
                return False
            start = chunk.end
        return True

    def cut(self, chunk: Chunk, budget: Seconds) -> Chunk:
        """Returns the longest beginning of `chunk` whose step fits `budget`, as far as costs are known.

        It has at least the tokens of the smallest entry. The first larger size of unknown cost is tried too.
        """
        num_tokens, num_ctx_blocks = 0, self._num_blocks(chunk.start)
        seconds: Seconds | None = 0.0
        while num_tokens < chunk.num_tokens and seconds is not None:
            entry = self.table.find_prompt(1, num_tokens + 1, num_ctx_blocks)
            seconds = None if entry is None else self.costs.seconds(entry)
            if entry is None or (num_tokens and seconds is not None and seconds > budget):
                break
            num_tokens = entry.query_len
        end = self._cut_end(chunk.start, chunk.start + num_tokens)
        if end >= chunk.end or not self.covers_rest(chunk.request, end):
            return chunk
        return Chunk(chunk.request, chunk.start, end - chunk.start)

    def find(self, chunks: Sequence[Chunk]) -> PromptEntry | None:
        """Returns the cheapest entry that covers these chunks together; None if there is none, or a chunk is empty."""
        if not all(chunk.num_tokens for chunk in chunks):
            return None
        return self.table.find_prompt(
            len(chunks),
            max(chunk.num_tokens for chunk in chunks),
            self._num_blocks(max(chunk.start for chunk in chunks)),
        )

    def may_join(self, chunks: Sequence[Chunk], more: Chunk, most: int) -> bool:
        """Returns whether it can pay off to add `more`, if the step may grow to `most` chunks."""
        together, apart = self.find([*chunks, more]), self._apart([*chunks, more])
        if together is None or not apart:
            return False
        num_rows = together.batch_size if together.batch_size <= most else len(apart)
        return together.num_tokens * len(apart) <= sum(entry.num_tokens for entry in apart) * num_rows

    def packed(
        self, chunks: Sequence[Chunk], budget: Seconds | None
    ) -> tuple[PromptEntry, Sequence[Chunk]] | None:
        """Returns the longest beginning of `chunks` that should share a step, and its entry; None if `chunks` is empty.

        Sharing pays if the step computes no more padded tokens than separate steps would, and fits `budget`. Each of
        `chunks` must have an entry that covers it alone.
        """
        for num in range(len(chunks), 0, -1):
            some = chunks[:num]
            entry, apart = self.find(some), self._apart(some)
            if entry is not None and (num == 1 or self._pays(entry, apart, budget)):
                return entry, some
        return None

    def needed(self, chunk: Chunk) -> PromptEntry:
        """Returns the exact shape of a step with as many tokens from the start of `chunk` on as one step may take."""
        query_len = min(chunk.request.num_tokens - chunk.start, self.limits.max_num_batched_tokens)
        return PromptEntry(1, query_len, self._num_blocks(chunk.start))

    def _apart(self, chunks: Sequence[Chunk]) -> list[PromptEntry]:
        """Returns one entry for each chunk; an empty list if a chunk has none."""
        found = [self.find([chunk]) for chunk in chunks]
        return [] if None in found else [entry for entry in found if entry is not None]

    def _pays(self, together: PromptEntry, apart: Sequence[PromptEntry], budget: Seconds | None) -> bool:
        if not apart or together.num_tokens > sum(entry.num_tokens for entry in apart):
            return False
        return budget is None or self._seconds(together, apart) <= budget

    def _seconds(self, together: PromptEntry, apart: Sequence[PromptEntry]) -> Seconds:
        """Returns how long a step takes. If that is unknown, returns the sum of its parts, which is more."""
        known = self.costs.seconds(together)
        parts = [self.costs.seconds(entry) for entry in apart] if known is None else [known]
        return math.fsum(math.inf if part is None else part for part in parts)  # Exact in every Python.

    def _cut_end(self, start: int, end: int) -> int:
        """Returns the last block end up to `end`, or `end` itself if that is not after `start`."""
        block_end = end - end % self.limits.block_size
        return block_end if block_end > start else end

    def _num_blocks(self, num_tokens: int) -> int:
        return num_blocks_for(num_tokens, self.limits.block_size)
