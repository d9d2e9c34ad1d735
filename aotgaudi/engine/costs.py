"""What steps cost: how long the last ones of each entry took. No clock of its own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from aotgaudi.entries import DecodeEntry, PromptEntry

_NUM_SAMPLES = 8
_FRESH_STEPS = 4096
"""What was seen longer ago than so many steps is forgotten: a machine, or who shares it, changes."""


@dataclass(slots=True)
class _Samples:
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_SAMPLES))
    seen_at: int = 0


class StepCosts:
    """The seconds of recent steps, by entry. One thread only.

    An estimate is the least of an entry's last samples: what disturbs a step makes it longer, never shorter.
    """

    def __init__(self) -> None:
        self._samples: dict[PromptEntry | DecodeEntry, _Samples] = {}
        self._num_steps = 0

    def observe(self, entry: PromptEntry | DecodeEntry, seconds: float) -> None:
        """Takes in how long a step of `entry` took."""
        self._num_steps += 1
        samples = self._fresh(entry) or _Samples()
        samples.seconds.append(seconds)
        samples.seen_at = self._num_steps
        self._samples[entry] = samples

    def seconds(self, entry: PromptEntry | DecodeEntry) -> float | None:
        """Returns how long a step of `entry` may take; None where nothing is known of it.

        A prompt entry that has not run lately is taken for the one of the nearest context that has: what new tokens cost is
        most of it.
        """
        samples = self._fresh(entry) or (self._nearest(entry) if isinstance(entry, PromptEntry) else None)
        return None if samples is None else min(samples.seconds)

    def _fresh(self, entry: PromptEntry | DecodeEntry) -> _Samples | None:
        samples = self._samples.get(entry)
        return samples if samples and self._num_steps - samples.seen_at < _FRESH_STEPS else None

    def _nearest(self, entry: PromptEntry) -> _Samples | None:
        alike = [
            other
            for other in self._samples
            if isinstance(other, PromptEntry)
            and (other.batch_size, other.query_len) == (entry.batch_size, entry.query_len)
            and self._fresh(other)
        ]
        if not alike:
            return None
        return self._fresh(min(alike, key=lambda other: abs(other.num_ctx_blocks - entry.num_ctx_blocks)))
