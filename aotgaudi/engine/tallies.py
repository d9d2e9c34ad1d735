"""What each entry has done: steps, seconds, padding, and what requests waited for in it. No torch.

======================  =================================================================================
figure                  counted for the entry of
======================  =================================================================================
steps, seconds, work    the step
queue, cached prefix    the step that computes a request's first chunk
first token             the step that gives a request its first token
gaps between tokens     the step that gives the later one
======================  =================================================================================

The engine's thread counts, once a step; any thread may ask. What is kept is bounded by the entries of the manifest.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from aotgaudi.engine.request import Request
from aotgaudi.engine.steps import DefragStep, PromptStep, Step, StepWork, work_of
from aotgaudi.entries import Entry

GAP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
"""Upper bounds of the histogram of gaps, in seconds; beyond the last there is one more bucket."""


@dataclass(slots=True)
class Total:
    """A sum of seconds, and of how many."""

    num: int = 0
    seconds: float = 0.0

    def add(self, seconds: float, num: int = 1) -> None:
        """Adds `num` of `seconds` each."""
        self.num += num
        self.seconds += seconds * num

    def __add__(self, other: Total) -> Total:
        """Returns both."""
        return Total(self.num + other.num, self.seconds + other.seconds)


@dataclass(slots=True)
class Tally:
    """What one entry, or several, have done. `num_cached_tokens` of `num_prefix_tokens` were found in the prefix cache."""

    steps: Total = field(default_factory=Total)
    work: StepWork = StepWork()  # noqa: RUF009 - a frozen value
    queue: Total = field(default_factory=Total)
    first_token: Total = field(default_factory=Total)
    gaps: Total = field(default_factory=Total)
    num_prefix_tokens: int = 0
    num_cached_tokens: int = 0

    def __add__(self, other: Tally) -> Tally:
        """Returns what both did."""
        return Tally(
            self.steps + other.steps,
            self.work + other.work,
            self.queue + other.queue,
            self.first_token + other.first_token,
            self.gaps + other.gaps,
            self.num_prefix_tokens + other.num_prefix_tokens,
            self.num_cached_tokens + other.num_cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class TalliesSnapshot:
    """One moment between two steps: entries in the order of their first step, and all gaps by `GAP_BOUNDS`."""

    entries: Mapping[Entry, Tally] = field(default_factory=dict)
    gap_counts: tuple[int, ...] = (0,) * (len(GAP_BOUNDS) + 1)
    gap_seconds: float = 0.0

    def by_kind(self) -> dict[str, Tally]:
        """Returns what the entries of each kind have done together; ``prompt`` and ``decode`` are always there."""
        found = {"prompt": Tally(), "decode": Tally()}
        for entry, tally in self.entries.items():
            found[entry.kind] = found.get(entry.kind, Tally()) + tally
        return found


class Tallies:
    """Counts, on the engine's thread; `snapshot` on any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[Entry, Tally] = {}
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
        """Counts a step of `requests`, of which `sampled` got a token. `span`: when it began and ended, in seconds."""
        begin, end = span
        work = work_of(step, block_size)
        with self._lock:
            tally = self._of(step.entry)
            tally.steps.add(end - begin)
            tally.work += work
            if isinstance(step, PromptStep):
                _count_arrivals(tally, requests, begin)
                _count_first_tokens(tally, sampled, end)
            self._count_gaps(tally, sampled, end)

    def count_defrag(self, step: DefragStep, seconds: float) -> None:
        """Counts a defragmentation."""
        with self._lock:
            self._of(step.entry).steps.add(seconds)

    def snapshot(self) -> TalliesSnapshot:
        """Returns a copy of all that was counted."""
        with self._lock:
            entries = {entry: _copy(tally) for entry, tally in self._entries.items()}
            return TalliesSnapshot(entries, tuple(self._gap_counts), self._gap_seconds)

    def _of(self, entry: Entry) -> Tally:
        tally = self._entries.get(entry)
        if tally is None:
            tally = self._entries[entry] = Tally()
        return tally

    def _count_gaps(self, tally: Tally, sampled: Sequence[Request], end: float) -> None:
        """Neighbours mostly got their last tokens in the same step: the same float, so gaps are added a run at a time."""
        last, num = None, 0
        for request in sampled:
            if request.last_token_at is not last:
                self._add_gap(tally, last, end, num)
                last, num = request.last_token_at, 0
            request.last_token_at = end
            num += 1
        self._add_gap(tally, last, end, num)

    def _add_gap(self, tally: Tally, last: float | None, end: float, num: int) -> None:
        if last is not None and num:
            gap = end - last
            tally.gaps.add(gap, num)
            self._gap_counts[bisect_left(GAP_BOUNDS, gap)] += num
            self._gap_seconds += gap * num


def _count_arrivals(tally: Tally, requests: Iterable[Request], begin: float) -> None:
    for request in requests:
        if request.started_at is None:
            request.started_at = begin
            tally.queue.add(request.queue_seconds)
            tally.num_prefix_tokens += request.num_prompt_tokens
            tally.num_cached_tokens += request.num_cached_tokens


def _count_first_tokens(tally: Tally, sampled: Iterable[Request], end: float) -> None:
    for request in sampled:
        if request.last_token_at is None:
            tally.first_token.add(max(0.0, end - request.arrived_at))


def _copy(tally: Tally) -> Tally:
    totals = (tally.steps, tally.queue, tally.first_token, tally.gaps)
    steps, queue, first_token, gaps = map(replace, totals)
    return replace(tally, steps=steps, queue=queue, first_token=first_token, gaps=gaps)
