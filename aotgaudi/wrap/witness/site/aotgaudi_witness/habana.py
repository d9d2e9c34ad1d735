"""What Intel's bridge for Gaudi counts in this process: graphs compiled, recipes found and missed. And its flush.

The bridge counts; nothing calls back. So it is asked four times a second, and a graph that was compiled is told without
where it came from. A recipe that is found, and was never missed in this process, was loaded: that is told once for each.
The newer style of its metrics must be asked, or its queue grows. Recipes are written by a thread of
the bridge: `_flush_disk_cache` waits for that.
Source: ``habana_frameworks/torch/hpu/metrics.py`` and ``utils/debug/__init__.py``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from aotgaudi_witness.report import Report
from aotgaudi_witness.witness import Witness

_METRICS = "habana_frameworks.torch.hpu.metrics"
_DEBUG = "habana_frameworks.torch.utils.debug"
_COMPILATIONS = "graph_compilation"
_STATISTICS = (
    ("hpu.graph_compilation", _COMPILATIONS, "TotalNumber"),
    ("hpu.recipe_hits", "recipe_cache", "RecipeHit"),
    ("hpu.recipe_misses", "recipe_cache", "RecipeMiss"),
    ("hpu.cpu_fallback", "cpu_fallback", "TotalNumber"),
)


def adapt(witness: Witness) -> None:
    """Adds the hook, the counters and the flush."""
    bridge = Bridge(witness.report)
    witness.hooks.add("habana.metrics", _METRICS, bridge.has_metrics)
    witness.count(bridge.counters)
    witness.flush(flush)


class Bridge:
    """The bridge's counters in this process. Asked by one thread at a time."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._num_compiled = 0
        self._found: set[str] = set()

    def has_metrics(self, module: ModuleType) -> bool:
        """Whether this bridge counts compiled graphs: else nothing could be proved."""
        return module.metric_global(_COMPILATIONS) is not None

    def counters(self) -> Mapping[str, int]:
        """Returns what the bridge has counted, and tells of graphs that were compiled since it was asked last."""
        module = sys.modules.get(_METRICS)
        if not hasattr(module, "metric_global"):
            return {}
        statistics = {metric: _statistics(module, metric) for metric in {m for _, m, _ in _STATISTICS}}
        counted = {name: _number(statistics[metric].get(tag)) for name, metric, tag in _STATISTICS}
        num = counted["hpu.graph_compilation"]
        if num > self._num_compiled:
            self._report.emit("compile", what="hpu", name=f"{num - self._num_compiled} graphs", stack=[])
            self._num_compiled = num
        self._tell_found(statistics["recipe_cache"])
        return counted

    def _tell_found(self, statistics: Mapping[str, Any]) -> None:
        missed = _keys(statistics.get("RecipeMiss"))
        for key in sorted(_keys(statistics.get("RecipeHit")) - missed - self._found):
            self._found.add(key)
            self._report.emit("loaded", what="recipe", name=key)


def flush() -> None:
    """Waits until the bridge has written its recipes; nothing where there is no bridge."""
    if "habana_frameworks.torch" in sys.modules:
        write = getattr(importlib.import_module(_DEBUG), "_flush_disk_cache", None)
        if write is None:
            raise RuntimeError("this bridge cannot be told to write its recipes")
        write()


def _statistics(module: Any, name: str) -> Mapping[str, Any]:
    metric = module.metric_global(name)
    if metric is None:
        return {}
    process = getattr(metric, "process", None)
    if process is not None:
        process()
    return dict(metric.stats())


def _keys(table: Any) -> set[str]:
    """Returns the recipes of a table of counts, as the names of their files have them: unsigned, 64 bits."""
    if not isinstance(table, Mapping):
        return set()
    return {str(int(key) % 2**64) for key, count in table.items() if count}


def _number(value: Any) -> int:
    """Returns a count, or how many recipes a table of counts is about; 0 for what was not counted."""
    return len(value) if isinstance(value, Mapping) else int(value or 0)
