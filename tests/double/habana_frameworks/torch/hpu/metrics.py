"""D-14: what is counted, in both styles. Source: ``metrics.py``, old and new, and ``saver.py`` of the bridge."""

from __future__ import annotations

import atexit
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from habana_frameworks.bridge import flags
from habana_frameworks.bridge.faults import has_fault
from habana_frameworks.bridge.journal import LISTENERS
from habana_frameworks.bridge.profile import PROFILE


class MetricNotFound(Exception):
    """There is no metric of that name."""


class Metric:
    """One metric. The newer style keeps events until it is asked."""

    def __init__(self, name: str, events: tuple[str, ...]) -> None:
        self._name, self._events = name, events
        self._queue: list[tuple[str, dict[str, object]]] = []
        self._callbacks: list[Callable[[Metric], None]] = []
        self._recipes: list[tuple[str, int]] = []
        self.reset()
        self.start()

    def name(self) -> str:
        """Returns the metric's name."""
        return self._name

    def start(self) -> None:
        """Counts from now on."""
        if self._hear not in LISTENERS:
            LISTENERS.append(self._hear)

    def stop(self) -> None:
        """Counts no more."""
        if self._hear in LISTENERS:
            LISTENERS.remove(self._hear)

    def reset(self) -> None:
        """Begins at zero; the list of compiled recipes stays, as in the bridge."""
        self._queue.clear()
        self._number = self._microseconds = 0
        self._hits: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._operators: Counter[str] = Counter()

    def on_metric_change(self, callback: Callable[[Metric], None]) -> None:
        """Calls `callback` at each event; never in the newer style (K-16)."""
        self._callbacks.append(callback)

    def stats(self) -> list[tuple[str, object]]:
        """Returns tags and values, in a fixed order."""
        self._process()
        if self._name == "graph_compilation":
            average = self._microseconds // self._number if self._number else 0
            rows: list[tuple[str, object]] = [
                ("TotalNumber", self._number),
                ("TotalTime", self._microseconds),
                ("AvgTime", average),
            ]
            has_details = flags.is_on("PT_HPU_METRICS_GC_DETAILS")
            return [*rows, ("recipe", list(self._recipes))] if has_details else rows
        if self._name == "cpu_fallback":
            return [("TotalNumber", self._number), ("FallbackOps", dict(self._operators))]
        if self._name == "memory_defragmentation":
            return [("TotalNumber", 0), ("TotalSuccessful", 0), ("AvgTime", 0), ("MaxTime", 0)]
        return [
            ("TotalHit", self._hits.total()),
            ("RecipeHit", dict(self._hits)),
            ("TotalMiss", self._misses.total()),
            ("RecipeMiss", dict(self._misses)),
        ]

    def _process(self) -> None:
        queue, self._queue = self._queue, []
        for event, details in queue:
            self._count(event, details)

    def _hear(self, event: str, details: dict[str, object]) -> None:
        if event not in self._events:
            return
        if PROFILE.queues_events:
            self._queue.append((event, details))
            return
        self._count(event, details)
        for callback in self._callbacks:
            callback(self)

    def _count(self, event: str, details: dict[str, object]) -> None:
        self._number += 1
        if event == "GRAPH_COMPILE":
            microseconds = int(str(details["microseconds"]))
            self._microseconds += microseconds
            self._recipes.append((str(details["recipe"]), microseconds))
        elif event == "CPU_FALLBACK":
            self._operators[str(details["op"])] += 1
        else:
            table = self._hits if event == "CACHE_HIT" else self._misses
            table[str(details["recipe_id"])] += 1


if PROFILE.queues_events:

    class Metric(Metric):  # type: ignore[no-redef]
        """With what the newer style adds."""

        def process(self) -> None:
            """Counts the events that are queued."""
            self._process()


_EVENTS = {
    "graph_compilation": ("GRAPH_COMPILE",),
    "cpu_fallback": ("CPU_FALLBACK",),
    "memory_defragmentation": (),
    "recipe_cache": ("CACHE_HIT", "CACHE_MISS"),
}
_METRICS: dict[str, Metric] = {}


def metric_debug_reload() -> None:
    """Registers what the flags ask for by now."""
    for name, events in _EVENTS.items():
        is_asked = name != "recipe_cache" or flags.is_on("PT_HPU_ENABLE_CACHE_METRICS")
        if is_asked and name not in _METRICS:
            _METRICS[name] = Metric(name, events)


def metric_global(name: str) -> Metric | None:
    """Returns the metric of the process; None if there is none of that name."""
    is_there = name != "recipe_cache" or not has_fault("no-recipe-metric")
    return _METRICS.get(name) if is_there else None


@contextmanager
def metric_localcontext(name: str) -> Iterator[Metric]:
    """A metric of its own for what happens inside. Raises MetricNotFound."""
    if name not in _METRICS:
        raise MetricNotFound(name)
    metric = Metric(name, _EVENTS[name])
    try:
        yield metric
    finally:
        if PROFILE.queues_events:
            metric._process()
        metric.stop()


def metrics_dump(file_name: str, triggered_by: str = "user") -> None:
    """Writes a record of each metric."""
    generated = time.strftime("%Y-%m-%d %H:%M:%S")
    records = [
        {
            "metric_name": name,
            "triggered_by": triggered_by,
            "generated_on": generated,
            "statistics": dict(metric.stats()),
        }
        for name, metric in _METRICS.items()
    ]
    Path(file_name).write_text(json.dumps(records), encoding="utf-8")


def _dump_at_exit() -> None:
    configured = flags.text("PT_HPU_METRICS_FILE") or flags.text("HABANA_PT_METRICS_FILE")
    triggers = flags.text("PT_HPU_METRICS_DUMP_TRIGGERS", "process_exit")
    if not configured or "process_exit" not in triggers:
        return
    path = Path(configured)
    rank = flags.text("RANK")
    path = path.with_name(f"{path.stem}{f'-rank{rank}' if rank else ''}{path.suffix}")
    number, unique = 0, path
    while os.path.lexists(unique):
        number += 1
        unique = path.with_name(f"{path.name}.{number}")
    metrics_dump(str(unique), "process_exit")


metric_debug_reload()
atexit.register(_dump_at_exit)
