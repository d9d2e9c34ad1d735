"""vLLM's speculative decode steps, in which some sequence computes several tokens: the drafted ones and the next.

vLLM's Gaudi plugin runs such a step as ``padded batch * tokens`` rows of one token (vllm_gaudi/v1/worker/
hpu_model_runner.py 3090-3250 and 2416-2492 at 091bbad). With n sequences over s blocks in all, and t the most tokens
of one of them:

1. The padded batch p is that of the bucket that ``(n, s)`` is looked up to, first among the *seeds*, the decode
   buckets before those of speculation are added.
2. The graph has ``p * t`` rows, over as many blocks as the bucket has that ``(p * t, t * s)`` is looked up to. Under
   contiguous paged attention blocks are block ids, which are not multiplied by t.

The rows are not padded further, so a graph of *exactly* that shape must be warm, and a larger entry does not help.
A look-up takes the first bucket that is large enough (``bucketing.upstream``). If there is none, blocks are not padded
either, and each total is a separate graph.

The answer changes only at sizes that buckets have, so steps are counted in runs (`SpeculativeRun`): all t, n and s that
run one graph. Under contiguous paged attention the highest block id also replaces s in the first look-up. The tables there
are full products, so p does not depend on s.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from aotgaudi.bucketing.reachable import Counterexample, ReachableDecodes, span
from aotgaudi.bucketing.strategy import Bucket, BucketingInputs
from aotgaudi.bucketing.versions import GaudiVersion, find_strategy, find_version
from aotgaudi.entries import DecodeEntry
from aotgaudi.errors import counted
from aotgaudi.spec.bucketing import BucketingSpec
from aotgaudi.spec.limits import ServingLimits


@dataclass(frozen=True, slots=True)
class SpeculativeRun:
    """Steps with at most `num_tokens` tokens per sequence that all run one graph.

    `first_batch_size` to `last_batch_size` sequences over `fewest_blocks` to `most_blocks` in all. `entry` is the graph. If
    `is_padded` is false, no bucket is large enough, and `entry` is the graph of the largest total.
    """

    decodes: ReachableDecodes
    num_tokens: int
    first_batch_size: int
    last_batch_size: int
    fewest_blocks: int
    most_blocks: int
    entry: DecodeEntry
    is_padded: bool

    @property
    def smallest_step(self) -> tuple[int, int, int]:
        """Tokens per sequence, sequences and blocks of the step with the fewest blocks, then sequences."""
        batch_size = max(self.first_batch_size, self.decodes.smallest_batch(self.fewest_blocks))
        return self.num_tokens, batch_size, max(self.fewest_blocks, batch_size)

    @property
    def smallest(self) -> Counterexample:
        """`smallest_step` as a counterexample. Its shape is that of the graph."""
        _, batch_size, blocks = self.smallest_step
        tokens = blocks * self.decodes.limits.block_size
        text = (
            f"a decode of {self.num_tokens} tokens of {counted(batch_size, 'sequence')}"
            f" over {counted(blocks, 'block')} ({tokens:,} tokens)"
        )
        return Counterexample(tokens, "speculative", (self.entry.batch_size, 1, self.entry.num_blocks), text)

    def __str__(self) -> str:
        batches = span(self.first_batch_size, self.last_batch_size)
        totals = span(self.fewest_blocks, self.most_blocks)
        return (
            f"decodes of {self.num_tokens} tokens of {batches} sequences over {totals} blocks: {self.entry}"
        )

    @property
    def num_steps(self) -> int:
        """The number of pairs (batch size, total of blocks)."""
        above, batches = self.decodes.steps_above, (self.first_batch_size, self.last_batch_size)
        return above(self.fewest_blocks - 1, *batches) - above(self.most_blocks, *batches)


@dataclass(frozen=True, slots=True)
class SpeculativeDecodes:
    """Steps of 2 to `most_tokens` tokens per sequence. `seeds`: the buckets to which a batch is padded first."""

    decodes: ReachableDecodes
    most_tokens: int
    seeds: tuple[Bucket, ...] = ()

    @classmethod
    def of(cls, limits: ServingLimits, bucketing: BucketingSpec) -> SpeculativeDecodes:
        """Returns the steps of a server; none with ``num_speculative_tokens = 0`` or if `is_modelled` is false."""
        decodes, drafted = ReachableDecodes(limits, bucketing.contiguous_pa), bucketing.num_speculative_tokens
        version = find_version(bucketing.version)
        if drafted == 0 or bucketing.strategy == "unified" or not is_modelled(bucketing):
            return cls(decodes, 1)
        if version.lookup is None or not version.lookup.has_seeds:
            return cls(decodes, drafted + 1)
        strategy = find_strategy(bucketing.version, bucketing.strategy)
        return cls(
            decodes, drafted + 1, strategy.decode_seed_table(BucketingInputs.from_spec(limits, bucketing))
        )

    @property
    def num_steps(self) -> int:
        """The number of triples (tokens, batch size, total of blocks)."""
        return (self.most_tokens - 1) * self.decodes.num_steps

    def holes(self, table: Iterable[DecodeEntry]) -> Iterator[SpeculativeRun]:
        """Yields the runs, under the look-up in `table`, whose graph is not one of its entries."""
        entries = frozenset(table)
        return (
            run
            for run in self.runs(entries)
            if run.num_steps and (not run.is_padded or run.entry not in entries)
        )

    def closing_entries(self, table: Iterable[DecodeEntry]) -> tuple[DecodeEntry, ...]:
        """Returns the graphs that `table` lacks, ascending. With them it has no holes."""
        entries = frozenset(table)
        closed = entries
        while missing := {run.entry for run in self.holes(closed)}:
            closed |= missing  # Other steps may be looked up to what is added.
        return tuple(sorted(closed - entries))

    def runs(self, table: Iterable[DecodeEntry]) -> Iterator[SpeculativeRun]:
        """Yields all steps, by tokens, batch size and blocks, under the look-up in `table`."""
        if self.most_tokens < 2:
            return
        seeds = _Lookup((batch_size, num_blocks) for batch_size, _, num_blocks in self.seeds)
        buckets = _Lookup((entry.batch_size, entry.num_blocks) for entry in table)
        for num_tokens in range(2, self.most_tokens + 1):
            factor = 1 if self.decodes.contiguous_pa else num_tokens
            cuts = {*seeds.blocks, *buckets.blocks, *(blocks // factor for blocks in buckets.blocks)}
            for first, last in self._bands({*seeds.batch_sizes, *buckets.batch_sizes}):
                for fewest, most in self._totals(first, last, cuts):
                    padded, _ = seeds.find(first, most) or buckets.find(first, most) or (last, most)
                    rows, blocks = padded * num_tokens, most * factor
                    found = buckets.find(rows, blocks)
                    entry = DecodeEntry(rows, 1, found[1] if found else blocks)
                    is_padded = found is not None
                    yield SpeculativeRun(
                        self.decodes, num_tokens, first, last, fewest, most, entry, is_padded
                    )

    def _bands(self, sizes: set[int]) -> Iterator[tuple[int, int]]:
        """Yields (first, last) of the batch sizes between which no bucket's batch size lies."""
        most = self.decodes.max_batch_size
        for below, last in pairwise(sorted({0, most, *(size for size in sizes if size < most)})):
            yield below + 1, last

    def _totals(self, first: int, last: int, cuts: set[int]) -> Iterator[tuple[int, int]]:
        """Yields (fewest, most) of the totals of some batches between which no bucket's size lies."""
        most = self.decodes.most_blocks(last)
        for below, upto in pairwise(sorted({first - 1, most, *(cut for cut in cuts if first <= cut < most)})):
            yield below + 1, upto


def is_modelled(bucketing: BucketingSpec) -> bool:
    """Whether a version runs speculative steps as described above, like the runners of vllm-gaudi from v0.11.2 on."""
    return isinstance(find_version(bucketing.version), GaudiVersion)


class _Lookup:
    """Upstream's look-up: the first of the buckets that are large enough, by batch size, then blocks."""

    def __init__(self, sizes: Iterable[tuple[int, int]]) -> None:
        """`sizes` holds the batch size and the blocks of each bucket."""
        blocks: dict[int, set[int]] = defaultdict(set)
        for batch_size, num_blocks in sizes:
            blocks[batch_size].add(num_blocks)
        self.batch_sizes = sorted(blocks)
        self._blocks = [sorted(blocks[batch_size]) for batch_size in self.batch_sizes]

    @property
    def blocks(self) -> set[int]:
        """All numbers of blocks that occur."""
        return {num_blocks for row in self._blocks for num_blocks in row}

    def find(self, batch_size: int, num_blocks: int) -> tuple[int, int] | None:
        """Returns the bucket's batch size and blocks, or None."""
        for index in range(bisect_left(self.batch_sizes, batch_size), len(self.batch_sizes)):
            row = self._blocks[index]
            if row[-1] >= num_blocks:
                return self.batch_sizes[index], row[bisect_left(row, num_blocks)]
        return None
