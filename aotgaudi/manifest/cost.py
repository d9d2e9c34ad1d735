"""What the steps of a manifest cost: hours of compiling if there are too many.

Users of the public tables met 14,368 prompt and 4,042 decode buckets (vllm-gaudi#762), and about 14 s of compiling for each
of 126 decode buckets (vllm-gaudi#1160). `find_explosion` warns, and names single changes that give fewer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from aotgaudi.errors import SpecError
from aotgaudi.manifest.enumerate import enumerate_entries
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.change import ValueChange, with_change

MANY_STEPS = 2000
"""We warn of more prompt, decode and unified entries than this."""

SECONDS_A_STEP = 14.0
"""Compile time of one bucket on Gaudi, as reported in vllm-gaudi#1160."""

_STEP_KINDS = ("prompt", "decode", "unified")
_USUAL_BATCHED_TOKENS = 8192


@dataclass(frozen=True)
class Explosion:
    """`num_steps`: the entries of each kind of step. `remedies`: single changes of the spec, fewest steps first."""

    num_steps: dict[str, int]
    remedies: tuple[tuple[ValueChange, int], ...]

    @property
    def total(self) -> int:
        """Steps of all kinds."""
        return sum(self.num_steps.values())

    @property
    def compile_seconds(self) -> float:
        """The time for compiling all of them in sequence."""
        return self.total * SECONDS_A_STEP

    def __str__(self) -> str:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.num_steps.items() if count)
        remedies = ", or ".join(
            f"{change.where} = {change.new!r} ({count:,})" for change, count in self.remedies
        )
        return (
            f"{self.total:,} step programs ({kinds}): {self.compile_seconds / 3600:,.1f} hours of compiling at"
            f" {SECONDS_A_STEP:g} s each, as in vllm-gaudi#1160; fewer with"
            f" {remedies or 'lower limits, or bounds under bucketing.prompt and bucketing.decode'}"
        )


def find_explosion(manifest: Manifest) -> Explosion | None:
    """Returns the warning, or None if there are at most `MANY_STEPS` steps."""
    num_steps = {kind: len(manifest.of_kind(kind)) for kind in _STEP_KINDS}
    total = sum(num_steps.values())
    if total <= MANY_STEPS:
        return None
    counted = ((change, _steps_with(manifest.spec, change)) for change in _candidates(manifest.spec))
    fewer = [(change, count) for change, count in counted if count is not None and count < total]
    return Explosion(num_steps, tuple(sorted(fewer, key=lambda remedy: remedy[1])))


def _candidates(spec: BuildSpec) -> Iterator[ValueChange]:
    limits, strategy = spec.limits, spec.bucketing.strategy
    if strategy not in ("exponential", "file"):
        yield ValueChange(("bucketing", "strategy"), strategy, "exponential")
    if limits.max_num_batched_tokens > _USUAL_BATCHED_TOKENS:
        where = ("limits", "max_num_batched_tokens")
        yield ValueChange(where, limits.max_num_batched_tokens, _USUAL_BATCHED_TOKENS)
    if limits.max_num_prefill_seqs > 1:
        yield ValueChange(("limits", "max_num_prefill_seqs"), limits.max_num_prefill_seqs, 1)


def _steps_with(spec: BuildSpec, change: ValueChange) -> int | None:
    """Returns the number of steps after a change; None if the spec cannot have it."""
    try:
        entries = enumerate_entries(with_change(spec, change))
    except SpecError:
        return None
    return sum(entry.kind in _STEP_KINDS for entry in entries)
