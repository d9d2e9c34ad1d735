"""What happens, told to the metrics and to the journal."""

from __future__ import annotations

from collections.abc import Callable

from habana_frameworks.bridge.journal import note

Listener = Callable[[str, dict[str, object]], None]

LISTENERS: list[Listener] = []


def emit(name: str, **details: object) -> None:
    """Tells everybody of `name`: GRAPH_COMPILE, CACHE_HIT, CACHE_MISS, CPU_FALLBACK; others go to the journal alone."""
    note(event=name, **details)
    for listener in LISTENERS:
        listener(name, details)
