"""Which sampler graph serves a batch. Imports no torch.

Settings are per-row tensors, so only what kind of work a batch needs decides the graph. A row that needs
less is served by a graph that does more: temperature 0 is greedy in all three, and top-k 0 with top-p 1
filters nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class SamplerSignature(Enum):
    """In ascending order of work."""

    GREEDY = "greedy"
    RANDOM = "random"
    FILTERED = "filtered"


def signature_of(settings: Iterable[tuple[float, float, int]]) -> SamplerSignature:
    """Returns the cheapest signature that serves every ``(temperature, top_p, top_k)`` of a batch."""
    needed = SamplerSignature.GREEDY
    for temperature, top_p, top_k in settings:
        if temperature > 0 and (top_p < 1 or top_k > 0):
            return SamplerSignature.FILTERED
        if temperature > 0:
            needed = SamplerSignature.RANDOM
    return needed
