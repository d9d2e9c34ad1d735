"""What happens, a JSON line each, in the file that AOTGAUDI_DOUBLE_JOURNAL names, for tests."""

from __future__ import annotations

import json
import os


def note(**fields: object) -> None:
    """Adds a line, if a journal is kept."""
    path = os.environ.get("AOTGAUDI_DOUBLE_JOURNAL")
    if path:
        with open(path, "ab", buffering=0) as file:
            file.write(json.dumps({"pid": os.getpid(), **fields}).encode() + b"\n")
