"""Whether every step that a scheduler can form has an entry: the exact answer, without walking the steps.

The steps, under the limits (B `block_size`, T `max_num_batched_tokens`, M `max_model_len`, N `num_blocks`,
S `max_num_seqs`):

* **Prompt.** One chunk of ``1 <= query <= T`` tokens after *any* context of ``ctx >= 0`` tokens with
  ``query + ctx <= M``, also one that ends inside a block; it is read as ``ceil(ctx / B)`` blocks. vLLM without chunked
  prefill computes whole prompts: after whole cached blocks, or, without prefix caching, after nothing. Counted in
  **cells**: (query rounded up to whole blocks, context blocks). A cell is covered when its longest query has an
  entry whose `query_len` and `num_ctx_blocks` are at least as large. N plays no part: a spec is refused where it
  does not hold a sequence of M tokens.
* Our own scheduler lets several chunks share a step only where an entry covers them together, else they take turns,
  so nothing has to be covered there. vLLM's may run them in a bucket that it adds: nothing is claimed of those.
* **Decode.** Every batch of ``1 .. min(S, N)`` sequences over every total of blocks from one a sequence to
  ``min(N, batch * ceil(M / B))``; under contiguous paged attention over any highest block id up to N. A block
  that several sequences of a step share counts once for each, so with sharing the total may exceed N: our own
  scheduler then takes fewer sequences into the step until an entry covers it, which one sequence alone
  always is. Of vLLM's such steps nothing is claimed.
* **Speculative decode**, of vLLM: `bucketing.speculation`.

An entry that covers a step covers every smaller one. So the longest covered query after c context blocks falls as
c grows, and changes only at the contexts that entries have. Between two of these, what is uncovered is a
`PromptHole`: a run of contexts and one length from which on queries are uncovered. Its cells are an arithmetic
series. Decodes are the same, with batch sizes for contexts. The proof is thus linear in the entries and does not
depend on how many steps there are.

Upstream's look-up finds an entry for a step of one token a sequence exactly where one covers it, so the proof holds for
both look-ups. Our own scheduler (engine/scheduler.py) forms fewer steps than these: it cuts chunks to the longest covered
query, where others decode to less, and starts them after cached blocks or inside a block, but only where entries cover
the rest. So without coverage it may still serve, in other and more steps than the limits say. Neither prefix
caching nor the policy of turns adds a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Union

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.reachable import Counterexample, ReachableDecodes, ReachablePrompts, counted, span
from aotgaudi.bucketing.speculation import SpeculativeDecodes, SpeculativeRun
from aotgaudi.spec.bucketing import BucketingSpec
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.scheduler import SchedulerSpec

_OWN_BUCKETING, _OWN_SCHEDULER = BucketingSpec(), SchedulerSpec()


@dataclass(frozen=True, slots=True)
class ReachableSteps:
    """All steps of which something is proved."""

    prompts: ReachablePrompts
    decodes: ReachableDecodes
    speculative: SpeculativeDecodes

    @classmethod
    def of(
        cls,
        limits: ServingLimits,
        bucketing: BucketingSpec = _OWN_BUCKETING,
        scheduler: SchedulerSpec = _OWN_SCHEDULER,
    ) -> ReachableSteps:
        """Returns what `scheduler` can form. Our own does not speculate."""
        decodes = ReachableDecodes(limits, bucketing.contiguous_pa)
        speculates = scheduler.engine == "vllm"
        return cls(
            prompts=ReachablePrompts.of(limits, bucketing, scheduler),
            decodes=decodes,
            speculative=SpeculativeDecodes.of(limits, bucketing)
            if speculates
            else SpeculativeDecodes(decodes, 1),
        )


@dataclass(frozen=True, slots=True)
class PromptHole:
    """After `first_ctx_blocks` to `last_ctx_blocks` blocks, queries of more than `covered_len` tokens are uncovered.

    Up to the longest that the limits leave there; after each of these contexts there are some. `covered_len` is 0
    where no query is covered.
    """

    reachable: ReachablePrompts
    first_ctx_blocks: int
    last_ctx_blocks: int
    covered_len: int

    @property
    def num_cells(self) -> int:
        """How many cells are uncovered: those above the covered rows."""
        num_contexts = self.last_ctx_blocks - self.first_ctx_blocks + 1
        covered_rows = self.covered_len // self.reachable.limits.block_size
        return self.reachable.cells_after(self.first_ctx_blocks, self.last_ctx_blocks) - (
            num_contexts * covered_rows
        )

    @property
    def smallest(self) -> Counterexample:
        """The step of the fewest tokens."""
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

    Up to the largest total of each batch; each of them has some. `covered_blocks` is 0 where no entry has as many
    sequences.
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
        """How many pairs (batch size, total) are uncovered."""
        return self.reachable.steps_above(self.covered_blocks, self.first_batch_size, self.last_batch_size)

    @property
    def smallest(self) -> Counterexample:
        """The step of the fewest blocks, then sequences."""
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


Hole = Union[PromptHole, DecodeHole, SpeculativeRun]


@dataclass(frozen=True, slots=True)
class PhaseCoverage:
    """How many of the steps of one kind can be formed, and how many of them have no entry.

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
    """The result of a proof. `unproved`: the kinds of entries that there are and of which it says nothing."""

    phases: tuple[PhaseCoverage, ...]
    smallest: Counterexample | None
    unproved: tuple[str, ...] = ()

    @property
    def is_closed(self) -> bool:
        """Whether every step of the phases has an entry; False where the server's own steps are not proved."""
        return self.smallest is None and not self.lacks_steps

    @property
    def lacks_steps(self) -> bool:
        """Whether nothing is said of the steps themselves: those of a vLLM server with unified attention."""
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
    holes: tuple[Hole, ...] = (*prompt, *decode, *speculative)
    return Coverage(tuple(phases), min((hole.smallest for hole in holes), default=None))


def uncovered(steps: ReachableSteps, table: BucketTable) -> Iterator[Hole]:
    """Yields what `table` does not cover of `steps`, in disjoint intervals; none: it is closed."""
    yield from prompt_holes(steps.prompts, table)
    yield from decode_holes(steps.decodes, table)
    yield from steps.speculative.holes(table.decode)


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
    """Cuts ``first..last`` where the reach changes: the largest y among the sizes (x, y) with an x as large.

    Yields (first, last, reach), ascending; the reach is 0 where no x is as large.
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
