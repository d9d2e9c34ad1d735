"""Whether every step that a scheduler can form has an entry, and the fewest entries that close a table. Both are exact.

Under the limits (B `block_size`, T `max_num_batched_tokens`, M `max_model_len`, N `num_blocks`, S `max_num_seqs`) these
steps can be formed:

* **Prompt.** One chunk of ``1 <= query <= T`` tokens after *any* context of ``ctx >= 0`` tokens with
  ``query + ctx <= M``, which reads ``ceil(ctx / B)`` blocks. vLLM without chunked prefill computes whole prompts: after
  whole cached blocks, or after nothing without prefix caching. Prompts are counted in **cells**: (query rounded up to
  whole blocks, context blocks). A cell is covered if its longest query has an entry whose `query_len` and
  `num_ctx_blocks` are at least as large. N plays no part, because a spec whose cache does not hold a sequence of M tokens
  is refused.
* Our scheduler puts several chunks into one step only if an entry covers them together. Otherwise they take turns, so such
  steps need no cover. vLLM may run them in a bucket that it adds. We claim nothing about those.
* **Decode.** Every batch of ``1 .. min(S, N)`` sequences over every total of blocks, from one per sequence to
  ``min(N, batch * ceil(M / B))``; under contiguous paged attention over any highest block id up to N. A block shared by
  several sequences of a step counts once for each, so the total may exceed N. Our scheduler then takes fewer sequences into
  the step until an entry covers it; a single sequence is always covered. We claim nothing about such steps of vLLM.
* **Speculative decode**, of vLLM: `bucketing.speculation`. Replicas in lockstep: `bucketing.replicas`.

**The proof.** An entry that covers a step covers every smaller one. So the longest covered query after c context blocks
falls as c grows, and changes only at the contexts that entries have. Between two of these, the uncovered steps form a
`PromptHole`: a run of contexts, and one length above which queries are uncovered. Its cells are an arithmetic series.
Decodes work the same way, with batch sizes instead of contexts. The cost is linear in the entries and does not depend on the
number of steps.

Upstream's look-up finds an entry for a step of one token per sequence exactly if some entry covers it, so the proof holds
for both look-ups. Our scheduler (engine/scheduler.py) forms fewer steps than these. It cuts chunks to the longest covered
query (or shorter, if others decode), and starts them after cached blocks or inside a block, but only if entries cover the
rest. So it may also serve without coverage, in other and more steps than the limits imply. Neither prefix caching nor the
scheduling policy adds a step.

**Closing a table** (``coverage = "closed"``). An added prompt entry has batch size 1 and the query length of a row
(whole blocks; T or M in the last one). It is *admissible* for the uncovered cells of a row if it is at least as long as
the row and at most `max_padding` times as long. Every uncovered cell gets an admissible entry, and each entry has as
much context as its cells need.

No smaller set of entries exists. Whether an entry can be admissible for a cell depends on the cell's row alone, and its
context can be chosen freely, so the task is to cover points on a line (the rows with holes) by intervals of a fixed
ratio. From the longest row down, the longest row without an entry must get one, and the entry of exactly its length
reaches as far down as any. The rows chosen this way are the **witnesses**: each is more than `max_padding` times as
long as the next, so no entry is admissible for two of them. There are as many witnesses as entries.

Decodes need at most one entry, of the largest uncovered batch and the largest uncovered total. Any uncovered decode is its
witness. Speculative steps need exactly the graphs that they run. All of these are added, and each is its own witness. The
rows with holes after one `PromptHole`'s contexts are an interval, so the search runs over holes, not over rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from fractions import Fraction
from math import ceil
from typing import Union

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.reachable import Counterexample, ReachableDecodes, ReachablePrompts, span
from aotgaudi.bucketing.replicas import padded_shapes
from aotgaudi.bucketing.speculation import SpeculativeDecodes, SpeculativeRun
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.errors import counted
from aotgaudi.spec.bucketing import BucketingSpec
from aotgaudi.spec.build_spec import ParallelSpec
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.scheduler import SchedulerSpec

_OWN_BUCKETING, _OWN_SCHEDULER, _ONE_DEVICE = BucketingSpec(), SchedulerSpec(), ParallelSpec()


@dataclass(frozen=True, slots=True)
class ReachableSteps:
    """All steps that the proof covers."""

    prompts: ReachablePrompts
    decodes: ReachableDecodes
    speculative: SpeculativeDecodes
    in_lockstep: bool = False

    @classmethod
    def of(
        cls,
        limits: ServingLimits,
        bucketing: BucketingSpec = _OWN_BUCKETING,
        scheduler: SchedulerSpec = _OWN_SCHEDULER,
        parallel: ParallelSpec = _ONE_DEVICE,
    ) -> ReachableSteps:
        """Returns what `scheduler` can form. Our own does not speculate, and has no replicas in lockstep."""
        decodes = ReachableDecodes(limits, bucketing.contiguous_pa)
        is_vllm = scheduler.engine == "vllm"
        return cls(
            prompts=ReachablePrompts.of(limits, bucketing, scheduler),
            decodes=decodes,
            speculative=SpeculativeDecodes.of(limits, bucketing)
            if is_vllm
            else SpeculativeDecodes(decodes, 1),
            in_lockstep=is_vllm and parallel.data_parallel_size > 1,
        )

    def padded_holes(self, table: BucketTable) -> Iterator[PaddedHole]:
        """Yields what replicas pad their steps to and `table` lacks."""
        shapes = padded_shapes(table) if self.in_lockstep else ()
        return (PaddedHole(entry, self.prompts.limits.block_size) for entry in shapes)


@dataclass(frozen=True, slots=True)
class PromptHole:
    """After `first_ctx_blocks` to `last_ctx_blocks` blocks, queries of more than `covered_len` tokens are uncovered.

    They extend to the longest query that the limits allow there. After each of these contexts some query is uncovered.
    `covered_len` is 0 if no query is covered.
    """

    reachable: ReachablePrompts
    first_ctx_blocks: int
    last_ctx_blocks: int
    covered_len: int

    @property
    def num_cells(self) -> int:
        """The number of uncovered cells, which are those above the covered rows."""
        num_contexts = self.last_ctx_blocks - self.first_ctx_blocks + 1
        covered_rows = self.covered_len // self.reachable.limits.block_size
        return self.reachable.cells_after(self.first_ctx_blocks, self.last_ctx_blocks) - (
            num_contexts * covered_rows
        )

    @property
    def smallest(self) -> Counterexample:
        """The uncovered step of the fewest tokens."""
        query_len, blocks = self.covered_len + 1, self.first_ctx_blocks
        context = self.reachable.shortest_context(blocks)
        text = f"a prompt chunk of {counted(query_len, 'token')}"
        if blocks:
            text += f" after {counted(context, 'token')} ({counted(blocks, 'block')}), {query_len + context:,} in all"
        return Counterexample(query_len + context, "prompt", (1, query_len, blocks), text)

    def __str__(self) -> str:
        queries = f"more than {counted(self.covered_len, 'token')}" if self.covered_len else "any length"
        return f"prompt chunks of {queries} after {span(self.first_ctx_blocks, self.last_ctx_blocks)} context blocks"


@dataclass(frozen=True, slots=True)
class DecodeHole:
    """In batches of `first_batch_size` to `last_batch_size`, totals of more than `covered_blocks` are uncovered.

    They extend to the largest total of each batch. Each batch size has uncovered totals. `covered_blocks` is 0 if no entry
    has as many sequences.
    """

    reachable: ReachableDecodes
    first_batch_size: int
    last_batch_size: int
    covered_blocks: int

    @property
    def fewest_blocks(self) -> int:
        """The smallest uncovered total of the smallest batch."""
        return max(self.covered_blocks + 1, self.first_batch_size)

    @property
    def num_steps(self) -> int:
        """The number of uncovered pairs (batch size, total)."""
        return self.reachable.steps_above(self.covered_blocks, self.first_batch_size, self.last_batch_size)

    @property
    def smallest(self) -> Counterexample:
        """The uncovered step of the fewest blocks, then sequences."""
        batch_size, blocks = self.first_batch_size, self.fewest_blocks
        tokens = blocks * self.reachable.limits.block_size
        text = f"a decode of {counted(batch_size, 'sequence')} over {counted(blocks, 'block')} ({tokens:,} tokens)"
        return Counterexample(tokens, "decode", (batch_size, 1, blocks), text)

    def __str__(self) -> str:
        batches = span(self.first_batch_size, self.last_batch_size)
        totals = (
            f"more than {counted(self.covered_blocks, 'block')}"
            if self.covered_blocks
            else "any number of blocks"
        )
        return f"decodes of {batches} sequences over {totals}"


@dataclass(frozen=True, slots=True)
class PaddedHole:
    """A shape that is no entry, and that replicas pad their steps to (``bucketing.replicas``)."""

    entry: PromptEntry | DecodeEntry
    block_size: int

    @property
    def smallest(self) -> Counterexample:
        """The shape itself, with its padding."""
        batch_size, query_len, blocks = shape = astuple(self.entry)
        num_tokens = batch_size * query_len + blocks * self.block_size
        return Counterexample(num_tokens, "replicas", shape, str(self))

    def __str__(self) -> str:
        return f"{self.entry}, to which replicas pad steps of each other"


Hole = Union[PromptHole, DecodeHole, SpeculativeRun, PaddedHole]


@dataclass(frozen=True, slots=True)
class PhaseCoverage:
    """How many of the steps of one kind can be formed, and how many of these have no entry.

    Steps are counted in `unit`: ``cells`` (prompt) or ``steps``.
    """

    kind: str
    unit: str
    num_reachable: int
    num_uncovered: int

    def __str__(self) -> str:
        return f"{self.num_uncovered:,} of {self.num_reachable:,} {self.kind} {self.unit}"


@dataclass(frozen=True, slots=True)
class Coverage:
    """The result of a proof. `unproved`: kinds of entries that the table has but the proof does not cover."""

    phases: tuple[PhaseCoverage, ...]
    smallest: Counterexample | None
    unproved: tuple[str, ...] = ()

    @property
    def is_closed(self) -> bool:
        """Whether every step has an entry. False if the proof does not cover the server's steps."""
        return self.smallest is None and not self.lacks_steps

    @property
    def lacks_steps(self) -> bool:
        """Whether the proof covers none of the steps: those of a vLLM server with unified attention."""
        return "unified" in self.unproved and not any(phase.kind == "prompt" for phase in self.phases)

    def __str__(self) -> str:
        """The result in one line."""
        if self.lacks_steps:
            return "nothing is proved of unified steps, which are all that this server forms"
        if self.smallest is None:
            return "every step that can be formed has an entry"
        holes = ", ".join(str(phase) for phase in self.phases if phase.num_uncovered)
        return f"no entry for {holes}; the smallest: {self.smallest}"


def prove_steps(steps: ReachableSteps, table: BucketTable) -> Coverage:
    """Returns what `table` covers of `steps`."""
    prompt, decode = tuple(prompt_holes(steps.prompts, table)), tuple(decode_holes(steps.decodes, table))
    speculative = tuple(steps.speculative.holes(table.decode))
    phases = [
        PhaseCoverage("prompt", "cells", steps.prompts.num_cells, sum(hole.num_cells for hole in prompt)),
        PhaseCoverage("decode", "steps", steps.decodes.num_steps, sum(hole.num_steps for hole in decode)),
    ]
    if steps.speculative.num_steps:
        num_uncovered = sum(run.num_steps for run in speculative)
        phases.append(PhaseCoverage("speculative", "steps", steps.speculative.num_steps, num_uncovered))
    padded = tuple(steps.padded_holes(table))
    if steps.in_lockstep:
        num_shapes = len(table.prompt) + len(table.decode) + len(padded)
        phases.append(PhaseCoverage("replicas", "shapes", num_shapes, len(padded)))
    holes: tuple[Hole, ...] = (*prompt, *decode, *speculative, *padded)
    return Coverage(tuple(phases), min((hole.smallest for hole in holes), default=None))


def uncovered(steps: ReachableSteps, table: BucketTable) -> Iterator[Hole]:
    """Yields the uncovered steps in disjoint intervals; nothing if `table` is closed."""
    yield from prompt_holes(steps.prompts, table)
    yield from decode_holes(steps.decodes, table)
    yield from steps.speculative.holes(table.decode)
    yield from steps.padded_holes(table)


def prompt_holes(reachable: ReachablePrompts, table: BucketTable) -> Iterator[PromptHole]:
    """Yields the holes of the prompt phase, by ascending context."""
    sizes = ((entry.num_ctx_blocks, entry.query_len) for entry in table.prompt)
    for first, last, covered_len in _bands(sizes, 0, reachable.max_ctx_blocks):
        if covered_len >= reachable.longest_query(first):
            continue
        yield PromptHole(reachable, first, min(last, reachable.longest_context(covered_len + 1)), covered_len)


def decode_holes(reachable: ReachableDecodes, table: BucketTable) -> Iterator[DecodeHole]:
    """Yields the holes of the decode phase, by ascending batch size."""
    sizes = ((entry.batch_size, entry.num_blocks) for entry in table.decode)
    for first, last, covered_blocks in _bands(sizes, 1, reachable.max_batch_size):
        if covered_blocks >= reachable.most_blocks(last):
            continue
        smallest = max(first, reachable.smallest_batch(covered_blocks + 1))
        yield DecodeHole(reachable, smallest, last, covered_blocks)


def _bands(sizes: Iterable[tuple[int, int]], first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Cuts ``first..last`` where the reach of x changes: the largest y of any size whose x is at least as large.

    Yields (first, last, reach), ascending. The reach is 0 beyond the largest x.
    """
    largest: dict[int, int] = {}
    for x, y in sizes:
        if y > largest.get(x, 0):
            largest[x] = y
    stairs, reach = [], 0
    for x in sorted(largest, reverse=True):
        if largest[x] > reach:
            reach = largest[x]
            stairs.append((x, reach))
    for x, reach in reversed(stairs):
        if first <= min(x, last):
            yield first, min(x, last), reach
            first = x + 1
    if first <= last:
        yield first, last, 0


AddedEntry = Union[PromptEntry, DecodeEntry]


@dataclass(frozen=True, slots=True)
class Addition:
    """An added entry, and the uncovered step that requires it. No other added entry is admissible for that step.

    `witness` is the step's exact shape: batch size, query length, (context) blocks.
    """

    entry: AddedEntry
    witness: tuple[int, int, int]


def closing_entries(
    steps: ReachableSteps, bucketing: BucketingSpec, table: BucketTable
) -> tuple[AddedEntry, ...]:
    """Returns the entries that `bucketing` adds to `table`: first those for holes, then those for replicas or speculation.

    Empty with ``coverage = "upstream"``, and for a unified table, which the proof does not cover.
    """
    if bucketing.coverage == "upstream" or bucketing.strategy == "unified":
        return ()
    added = tuple(addition.entry for addition in close(steps, bucketing.max_padding, table))
    prompts = (*table.prompt, *(entry for entry in added if isinstance(entry, PromptEntry)))
    decodes = (*table.decode, *(entry for entry in added if isinstance(entry, DecodeEntry)))
    padded = steps.padded_holes(BucketTable(prompts, decodes))
    return (*added, *(hole.entry for hole in padded), *steps.speculative.closing_entries(decodes))


def close(steps: ReachableSteps, max_padding: float, table: BucketTable) -> tuple[Addition, ...]:
    """Returns the fewest entries that close the prompts and decodes of `table`. None of them is in the table already."""
    prompts = tuple(prompt_holes(steps.prompts, table))
    decodes = tuple(decode_holes(steps.decodes, table))
    ratio = Fraction(str(max_padding))  # Exact, as it was written: five times 1.2 is 6.
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
    """The rows of a hole that still need an entry, ``first_row .. last_row``."""

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
        """Returns the longest query of the uncovered cell with the most context in `row`, and that context."""
        reachable, context = self.hole.reachable, self.most_context(row)
        return min(reachable.row_query(row), reachable.longest_query(context)), context

    def below(self, row: int) -> _OpenHole:
        """Returns what remains when `row` and longer rows have their entries."""
        return _OpenHole(self.hole, self.first_row, min(self.last_row, row - 1))


def _decode_additions(holes: Sequence[DecodeHole]) -> Iterator[Addition]:
    if not holes:
        return
    smallest, largest = holes[0], holes[-1]  # By ascending batch size. No smaller batch has more blocks.
    most = largest.reachable.most_blocks(largest.last_batch_size)
    yield Addition(
        DecodeEntry(largest.last_batch_size, 1, most), (smallest.first_batch_size, 1, smallest.fewest_blocks)
    )
