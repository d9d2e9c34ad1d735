"""Whose turn it is, prompts' or decodes', and how long a prompt step may take while others decode (docs/adr/0053).

==========  =============================================================  ===================================
policy      prefill steps in a row while somebody decodes                  how long such a step takes
==========  =============================================================  ===================================
latency     1                                                              as long as `Turns.allowance` says
throughput  as long as there are prompts with a seat, at most              as long as its tokens take
            `max_num_seqs`
==========  =============================================================  ===================================
"""

from __future__ import annotations

from aotgaudi.engine.costs import StepCosts
from aotgaudi.engine.steps import PromptStep, Step
from aotgaudi.entries import DecodeEntry
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.policy import Policy

_PATIENCE = 32
"""Who has waited for a first token for so many times as long as a step takes may have that step."""

_DECODES_PER_CHUNK = 1.5
"""How many decode steps a prompt step may be as long as, while others decode."""


class Turns:
    """Follows which steps are formed. One thread only. `now` is the seconds of all steps: there are always some to run."""

    def __init__(self, policy: Policy, limits: ServingLimits, costs: StepCosts) -> None:
        self._policy, self._limits, self._costs = policy, limits, costs
        self._last_decode: DecodeEntry | None = None
        self._num_prompt_steps = 0  # Since the last decode step.
        self.now = 0.0

    @property
    def is_decodes(self) -> bool:
        """Whether decodes go first."""
        most = 1 if self._policy == "latency" else self._limits.max_num_seqs
        return self._num_prompt_steps >= most

    def take(self, step: Step) -> None:
        """Notes that this step is the next to run."""
        if isinstance(step, PromptStep):
            self._num_prompt_steps += 1
        else:
            self._num_prompt_steps, self._last_decode = 0, step.entry

    def observe(self, seconds: float) -> None:
        """Takes in how long a step took."""
        self.now += seconds

    def allowance(
        self, num_decoding: int, num_prefilling: int, num_waiting: int, waited: float
    ) -> float | None:
        """Returns how many seconds a prompt step may take; None: any number.

        While more requests wait for a first token, with a seat or one to be had, than decode, a prompt step may be as long
        as any: more gain by that than lose. Otherwise it takes as long as one and a half decode steps: then tokens come as
        evenly with prompts beside them as without, and chunks are not so short that most of their time is for weights.

        Short chunks cost more a token all the same. So that under more prompts than they can cope with nobody waits for ever
        longer, a step may also take a share of what the oldest of these has `waited`.
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
