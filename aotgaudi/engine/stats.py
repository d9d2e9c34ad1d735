"""An engine's statistics: gauges, counts since its start, and counters per entry. Plain values, no torch.

The engine's thread updates an entry's counters once per step, and any thread may read them. There are at most as many as the
manifest has entries.

======================  ============================================================
counter                 is attributed to
======================  ============================================================
steps, seconds, work    the entry of the step
queue, cached prefix    the entry that computes a request's first chunk
first token             the entry that gives a request its first token
gaps between tokens     the entry that gives the later token
======================  ============================================================
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from aotgaudi.engine.request import Request
from aotgaudi.engine.steps import DefragStep, PromptStep, Step, StepWork, work_of
from aotgaudi.entries import Entry

GAP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
"""Upper bounds of the histogram of gaps, in seconds. One more bucket follows the last."""


@dataclass(slots=True)
class Total:
    """A count and a sum of seconds."""

    num: int = 0
    seconds: float = 0.0

    def add(self, seconds: float, num: int = 1) -> None:
        """Adds `num` events of `seconds` each."""
        self.num += num
        self.seconds += seconds * num

    def __add__(self, other: Total) -> Total:
        return Total(self.num + other.num, self.seconds + other.seconds)


@dataclass(slots=True)
class EntryCounters:
    """The counters of one entry or of several. The prefix cache had `num_cached_tokens` of `num_prefix_tokens`."""

    steps: Total = field(default_factory=Total)
    work: StepWork = StepWork()  # noqa: RUF009 - a frozen value
    queue: Total = field(default_factory=Total)
    first_token: Total = field(default_factory=Total)
    gaps: Total = field(default_factory=Total)
    num_prefix_tokens: int = 0
    num_cached_tokens: int = 0

    def __add__(self, other: EntryCounters) -> EntryCounters:
        names = (each.name for each in fields(self))
        return EntryCounters(*(getattr(self, name) + getattr(other, name) for name in names))


@dataclass(frozen=True, slots=True)
class CounterSnapshot:
    """All counters at a moment between two steps: entries in the order of their first step, and gaps by `GAP_BOUNDS`."""

    entries: Mapping[Entry, EntryCounters] = field(default_factory=dict)
    gap_counts: tuple[int, ...] = (0,) * (len(GAP_BOUNDS) + 1)
    gap_seconds: float = 0.0

    def by_kind(self) -> dict[str, EntryCounters]:
        """Returns the sum over the entries of each kind. ``prompt`` and ``decode`` are always present."""
        found = {"prompt": EntryCounters(), "decode": EntryCounters()}
        for entry, counters in self.entries.items():
            found[entry.kind] = found.get(entry.kind, EntryCounters()) + counters
        return found


class Counters:
    """Counts by entry. Only the engine's thread counts; any thread may call `snapshot`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[Entry, EntryCounters] = {}
        self._gap_counts = [0] * (len(GAP_BOUNDS) + 1)
        self._gap_seconds = 0.0

    def count(
        self,
        step: Step,
        block_size: int,
        requests: Iterable[Request],
        sampled: Sequence[Request],
        span: tuple[float, float],
    ) -> None:
        """Counts a step of `requests`, of which `sampled` got a token. `span` is when it began and ended, in seconds."""
        begin, end = span
        work = work_of(step, block_size)
        with self._lock:
            counters = self._of(step.entry)
            counters.steps.add(end - begin)
            counters.work += work
            if isinstance(step, PromptStep):
                _count_arrivals(counters, requests, begin)
                _count_first_tokens(counters, sampled, end)
            self._count_gaps(counters, sampled, end)

    def count_defrag(self, step: DefragStep, seconds: float) -> None:
        """Counts a defragmentation."""
        with self._lock:
            self._of(step.entry).steps.add(seconds)

    def snapshot(self) -> CounterSnapshot:
        """Returns a copy of all counters."""
        with self._lock:
            entries = {entry: _copy(counters) for entry, counters in self._entries.items()}
            return CounterSnapshot(entries, tuple(self._gap_counts), self._gap_seconds)

    def _of(self, entry: Entry) -> EntryCounters:
        counters = self._entries.get(entry)
        if counters is None:
            counters = self._entries[entry] = EntryCounters()
        return counters

    def _count_gaps(self, counters: EntryCounters, sampled: Sequence[Request], end: float) -> None:
        """Counts the gaps between tokens. Adds equal gaps together: neighbours mostly have the same time of last token."""
        last, num = None, 0
        for request in sampled:
            if request.last_token_at is not last:
                self._add_gap(counters, last, end, num)
                last, num = request.last_token_at, 0
            request.last_token_at = end
            num += 1
        self._add_gap(counters, last, end, num)

    def _add_gap(self, counters: EntryCounters, last: float | None, end: float, num: int) -> None:
        if last is not None and num:
            gap = end - last
            counters.gaps.add(gap, num)
            self._gap_counts[bisect_left(GAP_BOUNDS, gap)] += num
            self._gap_seconds += gap * num


def _count_arrivals(counters: EntryCounters, requests: Iterable[Request], begin: float) -> None:
    for request in requests:
        if request.started_at is None:
            request.started_at = begin
            counters.queue.add(request.queue_seconds)
            counters.num_prefix_tokens += request.num_prompt_tokens
            counters.num_cached_tokens += request.num_cached_tokens


def _count_first_tokens(counters: EntryCounters, sampled: Iterable[Request], end: float) -> None:
    for request in sampled:
        if request.last_token_at is None:
            counters.first_token.add(max(0.0, end - request.arrived_at))


def _copy(counters: EntryCounters) -> EntryCounters:
    totals = (counters.steps, counters.queue, counters.first_token, counters.gaps)
    steps, queue, first_token, gaps = map(replace, totals)
    return replace(counters, steps=steps, queue=queue, first_token=first_token, gaps=gaps)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot between two steps: gauges of that moment, and counts since the engine started.

    Attributes:
        num_prefill_tokens: Tokens computed in prefill steps, including those computed again after a preemption.
        num_output_tokens: Sampled tokens.
        num_finished: Requests by finish reason, or "error".
        num_invalid_logits: Requests for which the model computed NaN.
        num_blocks_kept: Free blocks that hold cached prefixes. `num_blocks_evicted` counts those given up for new contents.
        num_prefix_queries: Prompt tokens looked up in the prefix cache. `num_prefix_hits` of them were found.
        max_block_used: The highest block id in use.
        counters: Counters of finished steps, by entry.
        num_refused: Requests refused with 429, by the resource that was short. The engine's owner sets it.
        oldest_waiting_seconds: How long the head of the queue has waited; 0 for an empty queue.
        stalled_seconds: How long no step has ended although there is work.
    """

    num_running: int
    num_waiting: int
    num_blocks_used: int
    num_blocks_free: int
    num_failed_steps: int
    num_prefill_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_defrag_swaps: int
    num_finished: Mapping[str, int]
    num_invalid_logits: int = 0
    num_blocks_kept: int = 0
    num_blocks_evicted: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    max_block_used: int = 0
    counters: CounterSnapshot = field(default_factory=CounterSnapshot)
    num_refused: Mapping[str, int] = field(default_factory=dict)
    oldest_waiting_seconds: float = 0.0
    stalled_seconds: float = 0.0
