"""How prompts are cut into chunks, and which chunks share a step. Decisions about numbers of tokens; changes nothing.

A chunk has as many tokens as are known, as the step's budget leaves, and as an entry covers. Unless it reaches the last
known token it ends with a block. Where others decode and wait for it, it is cut to what fits an allowance of seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from aotgaudi.engine.blocks import num_blocks_for
from aotgaudi.engine.costs import StepCosts
from aotgaudi.engine.request import Request
from aotgaudi.engine.steps import StepTable
from aotgaudi.entries import PromptEntry
from aotgaudi.spec.limits import ServingLimits

Seconds = float


@dataclass(frozen=True, slots=True)
class Chunk:
    """`num_tokens` known tokens of a request from `start` on; 0 tokens where no entry covers any."""

    request: Request
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        """The first token after it."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Packed:
    """The chunks of one step, and its entry."""

    entry: PromptEntry
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Chunker:
    """Cuts prompts for the entries of `table`. `whole_blocks`: no chunk ends inside a block, but a prompt's last."""

    limits: ServingLimits
    table: StepTable
    costs: StepCosts
    whole_blocks: bool = False

    def longest(self, request: Request, start: int, budget: int) -> Chunk:
        """Returns the longest chunk from `start` on that one entry covers, of at most `budget` tokens."""
        remaining = request.num_tokens - start
        end = start + min(remaining, budget, self.table.max_query_len(self._num_blocks(start)))
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

    def cut(self, chunk: Chunk, allowance: Seconds) -> Chunk:
        """Returns the longest beginning of `chunk` whose step takes at most `allowance`, as far as is known.

        It has at least what the smallest entry takes. Of sizes of which nothing is known, one is tried at a time.
        """
        num_tokens, num_ctx_blocks = 0, self._num_blocks(chunk.start)
        seconds: Seconds | None = 0.0
        while num_tokens < chunk.num_tokens and seconds is not None:
            entry = self.table.find_prompt(1, num_tokens + 1, num_ctx_blocks)
            seconds = None if entry is None else self.costs.seconds(entry)
            if entry is None or (num_tokens and seconds is not None and seconds > allowance):
                break
            num_tokens = entry.query_len
        end = self._cut_end(chunk.start, chunk.start + num_tokens)
        if end >= chunk.end or not self.covers_rest(chunk.request, end):
            return chunk
        return Chunk(chunk.request, chunk.start, end - chunk.start)

    def find(self, chunks: Sequence[Chunk]) -> PromptEntry | None:
        """Returns the entry of least cost that covers these chunks together, if all have tokens and there is one."""
        if not all(chunk.num_tokens for chunk in chunks):
            return None
        return self.table.find_prompt(
            len(chunks),
            max(chunk.num_tokens for chunk in chunks),
            self._num_blocks(max(chunk.start for chunk in chunks)),
        )

    def may_join(self, chunks: Sequence[Chunk], more: Chunk, most: int) -> bool:
        """Returns whether one more chunk may turn out to pay, with those that may still come: `most` in all."""
        together, apart = self.find([*chunks, more]), self._apart([*chunks, more])
        if together is None or not apart:
            return False
        num_rows = together.batch_size if together.batch_size <= most else len(apart)
        return num_padded_tokens(together) * len(apart) <= sum(map(num_padded_tokens, apart)) * num_rows

    def packed(self, chunks: Sequence[Chunk], allowance: Seconds | None) -> Packed | None:
        """Returns as many chunks, from the first on, as had better share a step; None where there are none.

        They had where together they are no more padded tokens than apart, and take no longer than allowed. `chunks` are
        covered, each alone.
        """
        for num in range(len(chunks), 0, -1):
            some = tuple(chunks[:num])
            entry, apart = self.find(some), self._apart(some)
            if entry is not None and (num == 1 or self._pays(entry, apart, allowance)):
                return Packed(entry, some)
        return None

    def needed(self, chunk: Chunk) -> PromptEntry:
        """Returns the exact shape of what is left from the start of `chunk` on, as far as one step may have it."""
        query_len = min(chunk.request.num_tokens - chunk.start, self.limits.max_num_batched_tokens)
        return PromptEntry(1, query_len, self._num_blocks(chunk.start))

    def _apart(self, chunks: Sequence[Chunk]) -> list[PromptEntry]:
        """Returns an entry for each chunk; none at all where one lacks it."""
        found = [self.find([chunk]) for chunk in chunks]
        return [] if None in found else [entry for entry in found if entry is not None]

    def _pays(self, together: PromptEntry, apart: Sequence[PromptEntry], allowance: Seconds | None) -> bool:
        if not apart or num_padded_tokens(together) > sum(map(num_padded_tokens, apart)):
            return False
        return allowance is None or self._seconds(together, apart) <= allowance

    def _seconds(self, together: PromptEntry, apart: Sequence[PromptEntry]) -> Seconds:
        """Returns how long a step takes, or at most takes: as long as its parts."""
        known = self.costs.seconds(together)
        parts = [self.costs.seconds(entry) for entry in apart] if known is None else [known]
        return math.fsum(math.inf if part is None else part for part in parts)  # Exact: as every Python adds.

    def _cut_end(self, start: int, end: int) -> int:
        """Returns where a chunk ends that may reach to `end`: with a block, or inside one where none ends before."""
        block_size = self.limits.block_size
        block_end = end - end % block_size
        if block_end > start:
            return block_end
        return block_end + block_size if self.whole_blocks else end

    def _num_blocks(self, num_tokens: int) -> int:
        return num_blocks_for(num_tokens, self.limits.block_size)


def num_padded_tokens(entry: PromptEntry) -> int:
    """Returns the tokens that a prompt entry computes, padding included."""
    return entry.batch_size * entry.query_len
