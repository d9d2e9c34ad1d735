"""Traces: when requests came, and how many tokens each had and got. ``traffic.reading`` reads them from files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from aotgaudi.errors import SpecError

MAX_REQUESTS = 2_000_000
"""Most requests of a trace: some minutes of replay, and 200 MB."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival; all three have one item a request.

    Attributes:
        arrivals: Seconds since the first of them, ascending.
        prompt_tokens: Tokens of each prompt, at least 1.
        generated_tokens: Tokens that each was answered with; 0 where it got none.

    Raises:
        SpecError: It is empty, or a number is not what it says here.
    """

    arrivals: tuple[float, ...]
    prompt_tokens: tuple[int, ...]
    generated_tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = {len(self.arrivals), len(self.prompt_tokens), len(self.generated_tokens)}
        _require(len(lengths) == 1, "has columns of different lengths", "one item a request in each")
        _require(bool(self.arrivals), "has no requests", "at least one")
        _require(len(self.arrivals) <= MAX_REQUESTS, "has too many requests", f"at most {MAX_REQUESTS:,}")
        _require(all(map(math.isfinite, self.arrivals)), "has a time that is not finite", "seconds")
        _require(all(a <= b for a, b in pairwise(self.arrivals)), "has times out of order", "ascending times")
        _require(min(self.prompt_tokens) >= 1, "has a prompt without tokens", "1 token or more")
        _require(min(self.generated_tokens) >= 0, "has a negative number of tokens", "0 or more")

    def __len__(self) -> int:
        return len(self.arrivals)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.arrivals[-1] - self.arrivals[0]

    def part(self, first: int, last: int) -> Trace:
        """Returns the requests from number `first` (from 0) to before number `last`, the first of them at 0 s."""
        arrivals = self.arrivals[first:last]
        since = tuple(arrival - arrivals[0] for arrival in arrivals)
        return Trace(since, self.prompt_tokens[first:last], self.generated_tokens[first:last])

    def faster(self, factor: float) -> Trace:
        """Returns the same requests, coming `factor` times as fast."""
        since = tuple(arrival / factor for arrival in self.arrivals)
        return Trace(since, self.prompt_tokens, self.generated_tokens)

    def halves(self) -> tuple[Trace, Trace]:
        """Returns the earlier half of the requests, and the later one. Raises SpecError for fewer than two."""
        _require(len(self) > 1, "has one request", "at least two, to have two halves")
        middle = len(self) // 2
        return self.part(0, middle), self.part(middle, len(self))


@dataclass(frozen=True, slots=True)
class Drawing:
    """What `/metrics` does not say, for a trace that is drawn from its histograms.

    `requests_per_second` is how many came; `max_model_len` where the last bucket, which has no bound, ends;
    `num_requests` how many are drawn, None: as many as were counted, and 20,000 at most.
    """

    requests_per_second: float
    max_model_len: int
    num_requests: int | None = None


def _require(is_right: bool, problem: str, remedy: str) -> None:
    if not is_right:
        raise SpecError("trace", problem, remedy)
