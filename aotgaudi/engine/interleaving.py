"""The interleaving policy: whether prompts or decodes run next, and how long a prompt step may take while others decode.

==========  ==================================================  =========================================
policy      prompt steps in a row while others decode           how long such a step may take
==========  ==================================================  =========================================
latency     1                                                   what `Interleaving.budget` returns
throughput  while prompts have a seat, at most `max_num_seqs`   as long as its tokens need
==========  ==================================================  =========================================

Budgets follow from the times of recent steps of the same entries. The module reads no clock (docs/adr/0017-engine.md).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from aotgaudi.engine.steps import PromptStep, Step
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.policy import Policy

_NUM_SAMPLES = 8
_FRESH_STEPS = 4096
"""Samples older than this many steps are ignored, since the machine or its load may have changed."""
_PATIENCE = 32
"""A prompt step may take 1 / `_PATIENCE` of the time that the oldest prompt has waited."""
_DECODES_PER_CHUNK = 1.5
"""While others decode, a prompt step may take as long as this many decode steps."""


@dataclass(slots=True)
class _Samples:
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_SAMPLES))
    seen_at: int = 0


class StepCosts:
    """Estimates how long a step of an entry takes from its recent steps. Use it on one thread only.

    The estimate is the shortest recent step, because disturbances make steps longer, never shorter.
    """

    def __init__(self) -> None:
        self._samples: dict[PromptEntry | DecodeEntry, _Samples] = {}
        self._num_steps = 0

    def observe(self, entry: PromptEntry | DecodeEntry, seconds: float) -> None:
        """Records how long a step of `entry` took."""
        self._num_steps += 1
        samples = self._fresh(entry) or _Samples()
        samples.seconds.append(seconds)
        samples.seen_at = self._num_steps
        self._samples[entry] = samples

    def seconds(self, entry: PromptEntry | DecodeEntry) -> float | None:
        """Returns how long a step of `entry` takes; None if that is unknown.

        A prompt entry without recent steps gets the estimate of the entry with the same batch and query and the nearest
        context, because new tokens take most of a step's time.
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


class Interleaving:
    """Decides whether prompts or decodes run next. Use it on one thread only.

    `now` is a clock that counts the seconds of steps, so it stops while the engine is idle.
    """

    def __init__(self, policy: Policy, limits: ServingLimits, costs: StepCosts) -> None:
        self._policy, self._limits, self._costs = policy, limits, costs
        self._last_decode: DecodeEntry | None = None
        self._num_prompt_steps = 0  # Since the last decode step.
        self.now = 0.0

    @property
    def prefers_decodes(self) -> bool:
        """Whether decodes run before prompts in the next step."""
        most = 1 if self._policy == "latency" else self._limits.max_num_seqs
        return self._num_prompt_steps >= most

    def take(self, step: Step) -> None:
        """Notes that this step runs next."""
        if isinstance(step, PromptStep):
            self._num_prompt_steps += 1
        else:
            self._num_prompt_steps, self._last_decode = 0, step.entry

    def observe(self, seconds: float) -> None:
        """Advances `now` by the length of a step."""
        self.now += seconds

    def budget(self, num_decoding: int, num_prefilling: int, num_waiting: int, waited: float) -> float | None:
        """Returns how many seconds the next prompt step may take; None for no limit.

        If more requests wait for a first token (those that have a seat or can get one) than decode, the step may take any
        time, because more requests gain than lose. Otherwise it may take 1.5 decode steps. Tokens then come almost as evenly
        as without prompts, and chunks are long enough that reading the weights does not dominate.

        Short chunks still cost more per token, so prompts would wait ever longer on an overloaded server. Therefore the
        budget grows with `waited`, the seconds that the oldest prompt has waited.
        """
        if self._policy != "latency" or self._last_decode is None or not num_decoding:
            return None
        seconds = self._costs.seconds(self._last_decode)
        if seconds is None:
            return None
        num_seats = self._limits.max_num_seqs - num_decoding - num_prefilling
        if num_prefilling + min(num_seats, num_waiting) > num_decoding:
            return None
        return max(_DECODES_PER_CHUNK * seconds, waited / _PATIENCE)
