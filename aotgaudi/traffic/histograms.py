"""A trace out of the histograms of ``/metrics``: vLLM's, and those of our own server.

They say how many prompts had up to 100 tokens, 200, 500 and so on, and how many answers; nothing of which prompt had
which answer, nor of when requests came. So a trace is **drawn**:

* **Tokens.** Request i of n has the size at rank ``(i + 1/2) / n``, in a bucket as far as its rank is in the bucket's
  share. So each bucket has its share, and within one sizes are spread evenly. What is above the last bound
  is spread up to the model's length.
* **Pairs.** Prompts and answers are shuffled apart from each other: as if they did not depend on each other.
* **Times.** Arrivals are spread at random over ``n / requests_per_second`` seconds: a Poisson process of that rate. A
  server whose requests come in waves has larger batches at times.

The generator has a fixed seed, and only its `random()`, which is the same on every machine and in every version of Python.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import MappingProxyType

from aotgaudi.errors import SpecError
from aotgaudi.traffic.exposition import PREFIXES, samples_of
from aotgaudi.traffic.trace import Drawing, Trace

MOST_DRAWN = 20_000
"""How many requests are drawn of a server that has counted more: their sizes then miss nothing of note."""

_SUFFIXES: Mapping[str, str] = MappingProxyType(
    {"request_prompt_tokens": "prompts", "request_generation_tokens": "answers"}
)
_WANTED = "those of vLLM, vllm:request_prompt_tokens and vllm:request_generation_tokens, or ours"


@dataclass(frozen=True, slots=True)
class Histogram:
    """`bounds` ascend, the last one infinite; `counts` are those up to each bound."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]

    def sizes(self, num: int, most: int) -> list[int]:
        """Returns `num` sizes of 1 to `most` tokens, ascending, as the module says."""
        total, bucket = self.counts[-1], 0
        sizes = []
        for index in range(num):
            rank = (2 * index + 1) * total  # Over 2 * num.
            while self.counts[bucket] * 2 * num < rank:
                bucket += 1
            below = self.counts[bucket - 1] if bucket else 0
            low = int(self.bounds[bucket - 1]) if bucket else 0
            high = max(low + 1, int(min(self.bounds[bucket], most)))
            share = 2 * num * (self.counts[bucket] - below)
            sizes.append(min(most, max(1, low - -((rank - below * 2 * num) * (high - low)) // share)))
        return sizes


def drawn_trace(path: Path, text: str, drawing: Drawing | None) -> Trace:
    """Returns a trace that is drawn from the histograms in `text`, which was read from `path`.

    Raises:
        SpecError: They are not there, or are empty; or nobody said how many requests came a second.
        MissingPackageError: prometheus-client is not installed.
    """
    prompts, answers = (_histogram(path, text, suffix) for suffix in _SUFFIXES)
    if drawing is None:
        raise SpecError(
            str(path), "has histograms, which do not say when requests came", "--requests-per-second"
        )
    num = drawing.num_requests or min(prompts.counts[-1], answers.counts[-1], MOST_DRAWN)
    random, most = Random(0), drawing.max_model_len - 1  # noqa: S311 - sizes, not secrets
    seconds = num / drawing.requests_per_second
    return Trace(
        prompt_tokens=tuple(_shuffled(prompts.sizes(num, most), random)),
        generated_tokens=tuple(_shuffled(answers.sizes(num, most), random)),
        arrivals=tuple(_since_first(sorted(random.random() * seconds for _ in range(num)))),
    )


def _since_first(moments: Sequence[float]) -> Iterable[float]:
    return (moment - moments[0] for moment in moments)


def _shuffled(sizes: Sequence[int], random: Random) -> list[int]:
    keys = [random.random() for _ in sizes]
    return [size for _, size in sorted(zip(keys, sizes, strict=True))]


def _histogram(path: Path, text: str, suffix: str) -> Histogram:
    """The histogram of this name, summed over its labels: models, engines. Our own server has it under two names."""
    noun = _SUFFIXES[suffix]
    buckets = _buckets(path, text)
    names = {name for name, _, _ in buckets}  # A server may have the same under several names.
    own = next((f"{prefix}{suffix}_bucket" for prefix in PREFIXES if f"{prefix}{suffix}_bucket" in names), "")
    by_bound: dict[float, float] = defaultdict(float)
    for name, bound, count in buckets:
        if name == own:
            by_bound[bound] += count
    if math.inf not in by_bound:
        raise SpecError(str(path), f"has no histogram of the tokens of {noun}", _WANTED)
    bounds = sorted(by_bound)
    counts = [by_bound[bound] for bound in bounds]
    is_right = all(math.isfinite(count) and count >= 0 for count in counts) and counts == sorted(counts)
    if not is_right:
        raise SpecError(
            str(path), f"has a histogram of {noun} whose counts do not ascend", "as it was served"
        )
    if not counts[-1]:
        raise SpecError(
            str(path), f"has a histogram of {noun} that has counted nothing", "one after some traffic"
        )
    return Histogram(tuple(bounds), tuple(map(int, counts)))


def _buckets(path: Path, text: str) -> list[tuple[str, float, float]]:
    """The name, bound and count of every bucket in a text."""
    try:
        return [
            (one.name, float(one.labels["le"]), one.value)
            for one in samples_of(path, text, _WANTED)
            if one.name.endswith("_bucket")
        ]
    except (ValueError, KeyError) as error:
        raise SpecError(str(path), f"is not what /metrics answers: {error}", _WANTED) from error
