"""What the bridge counts in this process: compiled graphs, recipes found and missed, operators that fell back to the CPU.

``habana_frameworks.torch.hpu.metrics`` comes in two styles. The older one counts when something happens. The newer one
queues events and counts when it is read (K-16), so it must be read now and then. Both are read the same way here. The caller
imports the module and passes it in. Source: ``metrics.py`` of the bridge.

Compiling may continue in a thread of the bridge: synchronise with the device before you take a count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from aotgaudi.errors import TargetError

COMPILATIONS = "graph_compilation"
RECIPES = "recipe_cache"
FALLBACKS = "cpu_fallback"


class MetricsModule(Protocol):
    """The part of ``habana_frameworks.torch.hpu.metrics`` that we need."""

    def metric_global(self, name: str) -> Any:
        """Returns the metric of that name, or None."""
        ...


@dataclass(frozen=True, slots=True)
class Counts:
    """Totals of a process, or the difference of two totals.

    Attributes:
        compiled: Compiled graphs, not counting operators that run one by one (K-17).
        hits: Key of a recipe (H, decimal) -> how often it was found, in memory or on disk.
        misses: The same for recipes that were not found.
        fallbacks: Operators that ran on the CPU.
        eager_compiled: Entries of the cache for single operators, which grows with what `compiled` leaves out.
    """

    compiled: int = 0
    hits: Mapping[str, int] = field(default_factory=dict)
    misses: Mapping[str, int] = field(default_factory=dict)
    fallbacks: int = 0
    eager_compiled: int = 0

    def since(self, before: Counts) -> Counts:
        """Returns what was counted after `before`."""
        return Counts(
            self.compiled - before.compiled,
            _rise(before.hits, self.hits),
            _rise(before.misses, self.misses),
            self.fallbacks - before.fallbacks,
            self.eager_compiled - before.eager_compiled,
        )

    @property
    def recipes(self) -> frozenset[str]:
        """The keys of all recipes that were looked up."""
        return frozenset((*self.hits, *self.misses))


class Counters:
    """Reads the bridge's metrics. Thread-safe as far as the bridge is."""

    def __init__(self, metrics: MetricsModule, eager_cache_size: Callable[[], int] | None = None) -> None:
        """Reads `metrics`, and the number of compiled single operators if the bridge reports it.

        Raises:
            TargetError: this bridge does not count compiled graphs, so nothing could be proved.
        """
        self._metrics, self._eager_cache_size = metrics, eager_cache_size
        if metrics.metric_global(COMPILATIONS) is None:
            raise TargetError(f"target: this bridge has no metric {COMPILATIONS!r}")

    @property
    def knows_recipes(self) -> bool:
        """Whether the bridge counts each recipe. If not, it counts only compiled graphs."""
        return self._metrics.metric_global(RECIPES) is not None

    @property
    def knows_eager(self) -> bool:
        """Whether single operators are counted."""
        return self._eager_cache_size is not None

    def read(self) -> Counts:
        """Returns the totals since the process began, or since the metrics were reset."""
        recipes = self._stats(RECIPES)
        return Counts(
            compiled=self._total(COMPILATIONS),
            hits=_table(recipes, "RecipeHit"),
            misses=_table(recipes, "RecipeMiss"),
            fallbacks=self._total(FALLBACKS),
            eager_compiled=0 if self._eager_cache_size is None else int(self._eager_cache_size()),
        )

    def stop(self, name: str) -> None:
        """Ends a metric. Newer bridges would otherwise queue its events until somebody reads them."""
        metric = self._metrics.metric_global(name)
        if metric is not None:
            metric.stop()

    def _stats(self, name: str) -> Mapping[str, Any]:
        metric = self._metrics.metric_global(name)
        if metric is None:
            return {}
        process = getattr(metric, "process", None)
        if process is not None:
            process()
        return dict(metric.stats())

    def _total(self, name: str) -> int:
        return int(self._stats(name).get("TotalNumber", 0))


def require_found(unit: str, recipes: Iterable[str], counts: Counts, uncached: Collection[str] = ()) -> None:
    """Raises TargetError, naming a recipe, unless `unit` found all of its recipes and compiled nothing else.

    With a bridge that does not count each recipe (`Counters.knows_recipes`) this cannot be checked: only
    ``counts.compiled`` is known.

    Args:
        unit: The unit, for the message.
        recipes: The keys that were sealed for it.
        counts: What was counted during its first run, for this unit alone.
        uncached: Keys of graphs that compile to nothing, at every start (K-15).
    """
    lost = sorted(set(recipes) - counts.hits.keys(), key=int)
    if lost:
        raise TargetError(
            f"target: recipe {lost[0]} of {unit} was not found by the bridge: it looked for"
            f" {', '.join(sorted(counts.misses)) or 'none'} instead"
        )
    new = sorted(counts.misses.keys() - set(uncached), key=int)
    if new:
        raise TargetError(f"target: {unit} needed recipe {new[0]}, which was not sealed")
    num_misses = sum(counts.misses.values())
    if counts.compiled > num_misses:
        raise TargetError(
            f"target: {unit} compiled {counts.compiled} graphs, but the bridge missed {num_misses}"
        )


def _table(stats: Mapping[str, Any], tag: str) -> Mapping[str, int]:
    """Returns recipe -> count. Keys may be numbers. Negative ones are those of a signed 64-bit print."""
    return {str(int(key) % 2**64): int(count) for key, count in dict(stats.get(tag) or {}).items()}


def _rise(before: Mapping[str, int], after: Mapping[str, int]) -> Mapping[str, int]:
    rises = {key: count - before.get(key, 0) for key, count in after.items()}
    return {key: rise for key, rise in rises.items() if rise}
