"""How long a unit may take: what the most similar one took, where the store knows one; else the table.

Similar means: the same piece of a step (`layer`, `head`, ...) for the same kind of entry, and sizes that are near in
proportion. An estimate decides what comes first and what a person is told, and nothing else.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from aotgaudi.backends.base import Target
from aotgaudi.store.store import Store

UNIT_SECONDS: Mapping[str, float] = MappingProxyType(
    {
        "layer": 7.0,
        "embedding": 5.0,
        "head": 5.0,
        "sampler": 6.0,
        "swap": 4.0,
        "defrag": 4.0,
        "hc_pre": 8.0,
        "hc_post": 4.5,
        "mhc": 12.5,
    }
)
"""Compile seconds of a unit whose like was never compiled (measured: docs/benchmarks.md)."""

OTHER_SECONDS = 6.0
_MOST_RECORDS = 1000
"""How many earlier records are read: a hundredth of a second for 300."""

_NUMBER = re.compile(r"\d+")

Shape = tuple[str, tuple[int, ...]]
"""A label less its numbers, and the numbers: ``("layer (decode, #, #)", (4, 128))``."""


@dataclass(frozen=True)
class Estimates:
    """Compile seconds on one worker, from `seen`: label less numbers -> (numbers, seconds) of units compiled before."""

    seen: Mapping[str, tuple[tuple[tuple[int, ...], float], ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[tuple[str, float]]) -> Estimates:
        """From the labels and seconds of earlier compiles."""
        seen: dict[str, list[tuple[tuple[int, ...], float]]] = defaultdict(list)
        for label, seconds in rows:
            text, numbers = _shape(label)
            seen[text].append((numbers, seconds))
        return cls({text: tuple(samples) for text, samples in seen.items()})

    def unit_seconds(self, label: str) -> float:
        """Returns the expected seconds of a unit with this label, a number not below 0."""
        text, numbers = _shape(label)
        samples = self.seen.get(text)
        if samples:
            return min(samples, key=lambda sample: (_distance(sample[0], numbers), sample))[1]
        return UNIT_SECONDS.get(label.split(" ", 1)[0], OTHER_SECONDS)


def read_estimates(store: Store, target: Target) -> Estimates:
    """Returns what the store's records of `target`'s backend and machine say: of `_MOST_RECORDS`, evenly chosen."""
    keys = tuple(store.actions)
    chosen = keys[:: max(1, math.ceil(len(keys) / _MOST_RECORDS))]
    wanted = {name: value for name, value in target.components() if name in _DECISIVE}
    rows = []
    for value in store.actions.get_many(chosen).values():
        label, seconds, components = (value.get(n) for n in ("label", "compile_seconds", "components"))
        if not isinstance(label, str) or not isinstance(seconds, (int, float)) or seconds < 0:
            continue
        if isinstance(components, dict) and wanted.items() <= components.items():
            rows.append((label, float(seconds)))
    return Estimates.of(rows)


_DECISIVE = frozenset({"target.backend", "target.machine"})
"""What must be equal for one compile to say something of another; a new version of torch changes little."""


def _shape(label: str) -> Shape:
    return _NUMBER.sub("#", label), tuple(map(int, _NUMBER.findall(label)))


def _distance(left: tuple[int, ...], right: tuple[int, ...]) -> float:
    """How far sizes are apart, in doublings."""
    return sum(abs(math.log2((a + 1) / (b + 1))) for a, b in zip(left, right, strict=True))
