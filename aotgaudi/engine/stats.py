"""What an engine says of itself: a plain value, which may be sent to another process. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aotgaudi.engine.steps import StepWork
from aotgaudi.engine.tallies import TalliesSnapshot
from aotgaudi.entries import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot: gauges of one moment between two steps, and counts since the engine was made.

    `tallies` has what finished steps did, by entry. `num_prefill_tokens` counts tokens computed in prefill steps,
    including those computed again after a preemption; `num_output_tokens` counts sampled tokens. `num_finished`
    counts requests by finish reason, or "error". `num_invalid_logits` counts requests for which the model computed NaN.
    Of the free blocks `num_blocks_kept` hold cached prefixes; `num_blocks_evicted` were given up for new contents.
    `num_prefix_queries` and `num_prefix_hits` count tokens (aotgaudi/engine/prefix_cache.py). `max_block_used` is the
    highest block id in use.

    The last three are the engine's, not the core's: `num_refused` counts refusals for want of room by reason,
    `oldest_waiting_seconds` is how long the oldest waiting request has been there (0: nobody waits), and
    `stalled_seconds` how long no step has ended although there is work.
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
    tallies: TalliesSnapshot = field(default_factory=TalliesSnapshot)
    num_refused: Mapping[str, int] = field(default_factory=dict)
    oldest_waiting_seconds: float = 0.0
    stalled_seconds: float = 0.0

    @property
    def num_steps(self) -> Mapping[Entry, int]:
        """Finished steps by entry."""
        return {entry: tally.steps.num for entry, tally in self.tallies.entries.items()}

    @property
    def work(self) -> Mapping[str, StepWork]:
        """What finished steps computed and read, by kind of entry."""
        return {kind: tally.work for kind, tally in self.tallies.by_kind().items()}
