"""What happens, told to the metrics; and to the journal, a JSON line each, for tests."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable

Listener = Callable[[str, dict[str, object]], None]

_JOURNAL = os.environ.get("AOTGAUDI_DOUBLE_JOURNAL")
_LOCK = threading.Lock()
LISTENERS: list[Listener] = []


def emit(name: str, **details: object) -> None:
    """Tells everybody of `name`: GRAPH_COMPILE, CACHE_HIT, CACHE_MISS, CPU_FALLBACK; others go to the journal alone."""
    if _JOURNAL:
        line = json.dumps({"pid": os.getpid(), "event": name, **details}).encode() + b"\n"
        with _LOCK, open(_JOURNAL, "ab", buffering=0) as file:
            file.write(line)
    for listener in LISTENERS:
        listener(name, details)
