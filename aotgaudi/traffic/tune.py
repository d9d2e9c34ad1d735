"""Chooses buckets from traffic: replays a trace, counts the sizes of its steps, and takes the cheapest table.

1. **Demand.** The trace is replayed in a table with an entry for every size (`FineTable`), so that no choice of buckets
   influences the steps. The needed sizes are counted.
2. **Choice.** Among all ways to split a number of entries between prompts and decodes and to place them, the cheapest for
   that demand is chosen (``traffic.partition``). One entry of each phase is the largest reachable step, so the table is
   closed. A small share of the demand is spread over all reachable steps, for traffic that is not in this trace.
3. **Proof.** The spec with these buckets is enumerated and proved like any other.
4. **Judgement.** The trace is replayed in the chosen table. Buckets influence the steps: short buckets make the chunks that
   run with decodes shorter. So the prediction from the demand and the replay differ a little. Both are reported.

All numbers are integers, or seconds from the four basic operations, so every machine finds the same result.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.reachable import ReachableDecodes, ReachablePrompts
from aotgaudi.entries import DecodeEntry, PromptEntry, StepEntry
from aotgaudi.errors import SpecError
from aotgaudi.spec.bucketing import TunedBuckets
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.scheduler import SchedulerSpec
from aotgaudi.traffic.cost import WorkModel
from aotgaudi.traffic.partition import BestTables, Cost, Point, axis_values
from aotgaudi.traffic.replay import Replayed, replay
from aotgaudi.traffic.trace import Trace

MOST_ENTRIES = 400
"""The most entries of both phases together that a user may ask for."""

FEWEST_ENTRIES = 2

MOST_BATCH_SIZES = 16
"""The most batch sizes of decodes. Each needs sampler entries."""

_SPREAD = 100
"""1 / `_SPREAD` of the demand's work is spread over all reachable steps."""

_FINE = 10_000
"""How often each step counts, so that the spread share is a whole number even for large steps."""


@dataclass(frozen=True)
class FineTable:
    """A table with an entry for every query length in multiples of `query_step`, and for every batch size of decodes.

    Blocks and contexts are distinguished only as far as step times need it. Each size is a quarter more than the last.
    """

    limits: ServingLimits
    query_step: int

    def find_prompt(self, batch_size: int, query_len: int, num_ctx_blocks: int) -> PromptEntry | None:
        """Returns the entry for one chunk; None for several chunks or a query that is too long."""
        longest = self.max_query_len(num_ctx_blocks, batch_size)
        if query_len > longest:
            return None
        return PromptEntry(
            1, min(longest, _multiple(query_len, self.query_step)), self._rounded(num_ctx_blocks)
        )

    def find_decode(self, batch_size: int, num_blocks: int) -> DecodeEntry | None:
        """Returns the entry for a decode."""
        return DecodeEntry(batch_size, 1, self._rounded(num_blocks))

    def max_query_len(self, num_ctx_blocks: int, batch_size: int = 1) -> int:
        """Returns the longest query that a step can have."""
        del num_ctx_blocks
        return min(self.limits.max_num_batched_tokens, self.limits.max_model_len) if batch_size == 1 else 0

    def _rounded(self, num_blocks: int) -> int:
        return self._sizes[bisect_left(self._sizes, num_blocks)]

    @cached_property
    def _sizes(self) -> list[int]:
        return [0, *_geometric(self.limits.num_blocks, 1)]


@dataclass(frozen=True, slots=True)
class Padding:
    """The work of some steps in a table of `num_entries` prompts and decodes, and the part of it that they needed."""

    name: str
    num_entries: int
    work: int
    needed: int

    @property
    def share(self) -> float:
        """The share of the work that is padding."""
        return 1 - self.needed / self.work


class Tuner:
    """Chooses tables for one trace and one spec, for any number of entries. Replays the trace only once.

    Raises:
        SpecError: the spec describes a server whose steps differ from those of our scheduler's look-up, or no request fits.
    """

    def __init__(self, spec: BuildSpec, trace: Trace, work: WorkModel, query_step: int | None = None) -> None:
        _require_tunable(spec)
        self.spec, self.work = spec, work
        self.query_step = query_step or spec.limits.block_size
        self.trace, self.policy = trace, spec.scheduler.policy
        fine = FineTable(spec.limits, self.query_step)
        self.collected = replay(trace, spec.limits, fine, work.seconds, self.policy)
        prompts, decodes = demand_of(self.collected.needs, spec.limits, work, self.query_step)
        self._prompts = BestTables(prompts, work.prompt_work, MOST_ENTRIES)
        self._decodes = BestTables(decodes, work.decode_work, MOST_ENTRIES)

    def tuned(self, num_entries: int) -> BuildSpec:
        """Returns the spec with the cheapest buckets of at most `num_entries` prompts and decodes. Raises SpecError."""
        if not FEWEST_ENTRIES <= num_entries <= MOST_ENTRIES:
            raise SpecError("--entries", f"is {num_entries}", f"{FEWEST_ENTRIES} to {MOST_ENTRIES}")
        splits = ((num, num_entries - num) for num in range(1, num_entries))
        num_prompts, num_decodes = min(
            splits, key=lambda split: self._prompts.cost(split[0]) + self._decodes.cost(split[1])
        )
        prompts, decodes = self._prompts.boxes(num_prompts), self._decodes.boxes(num_decodes)
        return _with_buckets(
            self.spec, TunedBuckets(prompts=prompts, decodes=tuple(sorted((b, n) for n, b in decodes)))
        )

    def predicted(self, table: BucketTable, name: str) -> Padding:
        """Returns the cost of the needed steps in a table. Raises SpecError if it has no entry for one of them."""
        total = needed = 0
        for step, count in self.collected.needs.items():
            entry = _find(table, step)
            if entry is None:
                raise SpecError("bucketing", f"gives no entry for the step {step}", 'coverage = "closed"')
            total += self.work.work(entry) * count
            needed += self.work.work(step) * count
        return Padding(name, len(table.prompt) + len(table.decode), total, needed)

    def replayed(self, table: BucketTable, name: str) -> tuple[Padding, Replayed]:
        """Replays the trace in a table, and returns its cost and the replay."""
        found = replay(self.trace, self.spec.limits, table, self.work.seconds, self.policy)
        return Padding(
            name,
            len(table.prompt) + len(table.decode),
            sum(self.work.work(entry) * count for (_, entry), count in found.steps.items()),
            sum(self.work.work(needs) * count for needs, count in found.needs.items()),
        ), found


def demand_of(
    needs: Mapping[StepEntry, int], limits: ServingLimits, work: WorkModel, query_step: int
) -> tuple[Counter[Point], Counter[Point]]:
    """Returns how often each size of step is needed: prompts by (query, context blocks), decodes by (blocks, batch size).

    Each step counts `_FINE` times, plus the spread share. Queries are rounded up to the query step, batch sizes to a few
    best ones.
    """
    reachable = ReachablePrompts(limits), ReachableDecodes(limits)
    longest = reachable[0].longest_query(0)
    prompts: Counter[Point] = Counter()
    decodes: Counter[Point] = Counter()
    for entry, count in needs.items():
        if isinstance(entry, PromptEntry):
            query_len = min(longest, _multiple(entry.query_len, query_step))
            prompts[query_len, entry.num_ctx_blocks] += _FINE * count
        else:
            decodes[entry.num_blocks, entry.batch_size] += _FINE * count
    _spread(prompts, list(_prompt_places(reachable[0], query_step)), work.prompt_work)
    _spread(decodes, list(_decode_places(reachable[1])), work.decode_work)
    sizes = axis_values(decodes, work.decode_work, 1, MOST_BATCH_SIZES)
    few: Counter[Point] = Counter()
    for (num_blocks, batch_size), count in decodes.items():
        few[num_blocks, sizes[bisect_left(sizes, batch_size)]] += count
    return prompts, few


def _find(table: BucketTable, step: StepEntry) -> StepEntry | None:
    if isinstance(step, PromptEntry):
        return table.find_prompt(step.batch_size, step.query_len, step.num_ctx_blocks)
    return table.find_decode(step.batch_size, step.num_blocks)


def _with_buckets(spec: BuildSpec, buckets: TunedBuckets) -> BuildSpec:
    """Returns a spec with these buckets for our own engine. A vLLM server would read them from a file."""
    bucketing = spec.bucketing.model_copy(
        update={
            "strategy": "tuned",
            "tuned": buckets,
            "file_text": None,
            "short_queries": (),
            "coverage": "closed",
        }
    )
    scheduler = SchedulerSpec(policy=spec.scheduler.policy)
    return spec.model_copy(update={"bucketing": bucketing, "scheduler": scheduler})


def _require_tunable(spec: BuildSpec) -> None:
    bucketing = spec.bucketing
    refused = {
        "contiguous_pa": (bucketing.contiguous_pa, "false: a step's blocks then depend on where they lie"),
        "merged_prefill": (bucketing.merged_prefill, "false"),
        "num_speculative_tokens": (
            bucketing.num_speculative_tokens > 0,
            "0: our scheduler does not speculate",
        ),
        "strategy": (bucketing.strategy == "unified", "another: our scheduler forms prompt and decode steps"),
    }
    for name, (is_refused, remedy) in refused.items():
        if is_refused:
            raise SpecError(
                f"bucketing.{name}", f"is {getattr(bucketing, name)!r}, which cannot be tuned", remedy
            )
    if spec.target.execution_mode == "eager":
        raise SpecError("target.execution_mode", "is 'eager': there are no graphs to choose", "another mode")


def _spread(counts: Counter[Point], places: list[Point], cost: Cost) -> None:
    """Adds 1 / `_SPREAD` of the present work, spread equally over `places`, with a count of at least 1 at each."""
    total = sum(count * cost(*point) for point, count in counts.items())
    for place in places:
        counts[place] += max(1, total // (_SPREAD * len(places) * cost(*place)))


def _prompt_places(reachable: ReachablePrompts, query_step: int) -> Iterator[Point]:
    """Yields reachable queries and contexts on a grid that is finer for small values, and their corner last."""
    longest = reachable.longest_query(0)
    for query in _geometric(longest, query_step):
        for context in (0, *_geometric(reachable.max_ctx_blocks, 1)):
            if context <= reachable.longest_context(query):
                yield query, context
    yield longest, reachable.max_ctx_blocks


def _decode_places(reachable: ReachableDecodes) -> Iterator[Point]:
    batches, most = _geometric(reachable.max_batch_size, 1), reachable.most_blocks(reachable.max_batch_size)
    for blocks in _geometric(most, 1):
        for batch in batches:
            if reachable.smallest_batch(blocks) <= batch <= blocks:
                yield blocks, batch
    yield most, reachable.max_batch_size


def _geometric(most: int, step: int) -> list[int]:
    """Returns multiples of `step`, ascending, up to `most`. Each is about a quarter more than the one before."""
    values = [min(most, step)]
    while values[-1] < most:
        values.append(min(most, _multiple(values[-1] * 5 // 4 + 1, step)))
    return values


def _multiple(value: int, step: int) -> int:
    return -(-value // step) * step
