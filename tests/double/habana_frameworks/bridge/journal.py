"""What happens: a JSON line each in the file that AOTGAUDI_DOUBLE_JOURNAL names, for tests, and told to the metrics."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

Listener = Callable[[str, dict[str, object]], None]

LISTENERS: list[Listener] = []


def note(**fields: object) -> None:
    """Adds a line, if a journal is kept."""
    path = os.environ.get("AOTGAUDI_DOUBLE_JOURNAL")
    if path:
        with open(path, "ab", buffering=0) as file:
            file.write(json.dumps({"pid": os.getpid(), **fields}).encode() + b"\n")


def emit(name: str, **details: object) -> None:
    """Tells everybody of `name`: GRAPH_COMPILE, CACHE_HIT, CACHE_MISS, CPU_FALLBACK; others go to the journal alone."""
    note(event=name, **details)
    for listener in LISTENERS:
        listener(name, details)
