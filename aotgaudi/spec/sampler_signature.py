"""Which sampler graph serves a setting, a request or a batch of any of them.

The values of a setting are per-row tensors of a graph, so only the kind of work that they need decides the graph. A
signature names that work: how tokens are chosen, whether penalties change the logits first, whether log-probabilities are
returned, and whether constraints (a mask of allowed tokens, biases) apply. Seeds need nothing, since noise is an input.

A graph that does more also serves a row that needs less, and the row gets the token that it would get alone:
temperature 0 is greedy in every graph; top-p 1, top-k 0 and min-p 0 filter nothing; neutral penalties and a mask that
allows every token change nothing. So signatures are ordered part by part, and the least signature that is at least that of
every row (`join_all`) serves a batch. A mix of requests decides nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple, Protocol

NUM_BIASED_TOKENS = 300
"""Tokens of a row that a graph with constraints can bias: as many as OpenAI's API takes."""


class SamplerWork(IntEnum):
    """How a token is chosen; each kind includes the ones before it."""

    GREEDY = 0
    RANDOM = 1
    FILTERED = 2
    """Top-k and top-p."""
    MIN_P = 3


class SamplerSignature(NamedTuple):
    """What a sampler graph does. Compared as a tuple: the cheaper of two comes first, work before the rest."""

    work: SamplerWork = SamplerWork.GREEDY
    penalties: bool = False
    logprobs: bool = False
    constraints: bool = False

    def __str__(self) -> str:
        names = [name for name in self._fields[1:] if getattr(self, name)]
        return "+".join((self.work.name.lower(), *names))

    def join(self, other: SamplerSignature) -> SamplerSignature:
        """Returns the least signature that serves what either serves."""
        return SamplerSignature(
            max(self.work, other.work),
            self.penalties or other.penalties,
            self.logprobs or other.logprobs,
            self.constraints or other.constraints,
        )

    def serves(self, other: SamplerSignature) -> bool:
        """Whether a graph of this signature does all that `other` needs."""
        return self.join(other) == self


class SamplingValues(Protocol):
    """What settings, sampler entries and requests have in common."""

    @property
    def temperature(self) -> float: ...  # noqa: D102
    @property
    def top_p(self) -> float: ...  # noqa: D102
    @property
    def top_k(self) -> int: ...  # noqa: D102
    @property
    def min_p(self) -> float: ...  # noqa: D102
    @property
    def presence_penalty(self) -> float: ...  # noqa: D102
    @property
    def frequency_penalty(self) -> float: ...  # noqa: D102
    @property
    def repetition_penalty(self) -> float: ...  # noqa: D102


def signature_of(values: SamplingValues, *, logprobs: bool, constraints: bool = False) -> SamplerSignature:
    """Returns the cheapest signature that serves these values; all legal values have one."""
    is_penalised = bool(values.presence_penalty or values.frequency_penalty) or values.repetition_penalty != 1
    return SamplerSignature(_work_of(values), is_penalised, logprobs, constraints)


def join_all(signatures: Iterable[SamplerSignature]) -> SamplerSignature:
    """Returns the signature of a batch: the least that serves every row. Greedy for an empty batch."""
    return functools.reduce(SamplerSignature.join, set(signatures), SamplerSignature())


def missing_joins(signatures: Iterable[SamplerSignature]) -> tuple[SamplerSignature, ...]:
    """Returns, ascending, the joins of `signatures` that are missing among them, so that both together are closed."""
    given = frozenset(signatures)
    closed = set(given)
    for signature in given:
        closed |= {signature.join(other) for other in closed}
    return tuple(sorted(closed - given))


def _work_of(values: SamplingValues) -> SamplerWork:
    if values.temperature == 0:
        return SamplerWork.GREEDY
    if values.min_p > 0:
        return SamplerWork.MIN_P
    if values.top_p < 1 or values.top_k > 0:
        return SamplerWork.FILTERED
    return SamplerWork.RANDOM
