"""The sampler's parameters, and which sampler graph serves a setting, a request or a batch of any of them.

`SamplingValues` declares each parameter once. Request bodies, `SamplingParams`, the settings of a spec, entries and refusals
follow from that.

The values of a setting are per-row tensors of a graph, so only the kind of work that they need decides the graph. A
signature names that work: how tokens are chosen, whether penalties change the logits first, whether log-probabilities are
returned, and whether constraints (a mask of allowed tokens, biases) apply. Seeds need nothing, since noise is an input.

A graph that does more also serves a row that needs less, and the row gets the token that it would get alone:
temperature 0 is greedy in every graph; top-p 1, top-k 0, min-p 0 and top-n-sigma 0 filter nothing; neutral penalties and a
mask that allows every token change nothing. So signatures are ordered part by part, and the least signature that is at least
that of every row (`join_all`) serves a batch. A mix of requests decides nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

NUM_BIASED_TOKENS = 300
"""Tokens of a row that a graph with constraints can bias: as many as OpenAI's API takes."""


class SamplerWork(IntEnum):
    """How a token is chosen; each kind includes the ones before it."""

    GREEDY = 0
    RANDOM = 1
    FILTERED = 2
    """Top-k and top-p."""
    MIN_P = 3
    TOP_N_SIGMA = 4


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


class Parameter(NamedTuple):
    """A sampler parameter: what it may be, and what it costs.

    Attributes:
        neutral: The value that changes nothing.
        requests, settings: The ranges of requests and of a spec's settings, under the names of pydantic's ``Field``.
        allowed: The range of requests in words.
        work: The kind of work that other values need; None: penalties.
        need: What a setting must have to allow other values.
        example: The value in a setting that stands for this kind of work; None: another parameter stands for it.
        dtype: Of the graph's input.
        is_late: Specs and stored entries leave the parameter out while it is neutral, because they are older.
    """

    neutral: float
    requests: Mapping[str, float]
    settings: Mapping[str, float]
    allowed: str
    work: SamplerWork | None
    need: str
    example: float | None = None
    dtype: Literal["float32", "int64"] = "float32"
    is_late: bool = False

    def accepts(self, value: object) -> bool:
        """Whether a request may have this value."""
        kinds = int if self.dtype == "int64" else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool):
            return False
        low, high = self.requests.get("ge", float("-inf")), self.requests.get("le", float("inf"))
        return low <= value <= high and value > self.requests.get("gt", float("-inf"))


def _declared(default: Any, neutral: float, *others: Any, **named: Any) -> Any:
    return field(default=default, metadata={"parameter": Parameter(neutral, *others, **named)})


_SHARE, _ABOVE_ZERO = {"ge": 0, "le": 1}, {"gt": 0, "le": 1}
_PENALTY = {"ge": -2, "le": 2}
_FILTERED = "top_p below 1 or top_k above 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingValues:
    """The values of all parameters, each declared here. The defaults are those of requests.

    Attributes:
        temperature: 0 is greedy.
        top_p: The share of the likeliest tokens that is kept; 1 keeps all.
        top_k: How many tokens are kept; 0 keeps all.
        min_p: Tokens less likely than this share of the likeliest are dropped.
        presence_penalty, frequency_penalty: As in OpenAI's API.
        repetition_penalty: As in vLLM's.
        top_n_sigma: Tokens are kept whose logit is at most this many standard deviations of all logits below the largest
            (`aotgaudi.graphs.sampler`); 0 keeps all.
    """

    temperature: float = _declared(
        1.0,
        0.0,
        {"ge": 0, "le": 2},
        {"ge": 0},
        "a number from 0 to 2",
        SamplerWork.RANDOM,
        "a temperature above 0",
        example=1.0,
    )
    top_p: float = _declared(
        1.0, 1.0, _ABOVE_ZERO, _ABOVE_ZERO, "a number in (0, 1]", SamplerWork.FILTERED, _FILTERED
    )
    top_k: int = _declared(
        0,
        0,
        {"ge": -1},
        {"ge": 0, "le": 2**31 - 1},
        "0 or -1 (off), or a positive integer",
        SamplerWork.FILTERED,
        _FILTERED,
        example=1,
        dtype="int64",
    )
    min_p: float = _declared(
        0.0, 0.0, _SHARE, _SHARE, "a number from 0 to 1", SamplerWork.MIN_P, "min_p above 0", example=1.0
    )
    presence_penalty: float = _declared(
        0.0, 0.0, _PENALTY, _PENALTY, "a number from -2 to 2", None, "a penalty", example=1.0
    )
    frequency_penalty: float = _declared(
        0.0, 0.0, _PENALTY, _PENALTY, "a number from -2 to 2", None, "a penalty"
    )
    repetition_penalty: float = _declared(
        1.0,
        1.0,
        # Others would make logits overflow 16-bit floats. Text is noise long before that.
        {"ge": 0.01, "le": 100},
        {"gt": 0},
        "a number from 0.01 to 100",
        None,
        "a penalty",
    )
    top_n_sigma: float = _declared(
        0.0,
        0.0,
        {"ge": 0, "le": 100},
        {"ge": 0, "le": 100},
        "a number from 0 to 100",
        SamplerWork.TOP_N_SIGMA,
        "top_n_sigma above 0",
        example=1.0,
        is_late=True,
    )


PARAMETERS: Mapping[str, Parameter] = MappingProxyType(
    {each.name: each.metadata["parameter"] for each in fields(SamplingValues)}
)
"""The parameters by name, in the order of `SamplingValues`."""


def signature_of(values: object, *, logprobs: bool, constraints: bool = False) -> SamplerSignature:
    """Returns the cheapest signature that serves the parameters that `values` has as attributes; legal values have one."""
    asked = [each for name, each in PARAMETERS.items() if getattr(values, name) != each.neutral]
    works = [each.work for each in asked if each.work is not None]
    is_random = SamplerWork.RANDOM in works  # Temperature 0 is greedy, whatever the filters are.
    work = max(works) if is_random else SamplerWork.GREEDY
    return SamplerSignature(work, any(each.work is None for each in asked), logprobs, constraints)


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
