"""What the engine counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aotgaudi.entries import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot: gauges of one moment between two steps, and counts since the engine was made.

    `num_steps` counts finished steps by entry. `num_prefill_tokens` are tokens computed in prefill steps,
    again after a preemption included; `num_output_tokens` are sampled tokens. `num_finished` counts requests
    by finish reason, or "error".
    """

    num_running: int
    num_waiting: int
    num_blocks_used: int
    num_blocks_free: int
    num_steps: Mapping[Entry, int]
    num_failed_steps: int
    num_prefill_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_defrag_swaps: int
    num_finished: Mapping[str, int]
