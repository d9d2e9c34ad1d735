"""A probe's process; its arguments are MODULE.FUNCTION, ARGUMENTS (JSON) and RESULT (a file)."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from aotgaudi.doctor.hpu.probes.bridge import one_line


def main() -> None:
    """Runs a probe with arguments in JSON, and writes what it saw, or what went wrong, to the file RESULT."""
    name, arguments, result = sys.argv[1:]
    module, _, function = name.partition(".")
    try:
        probe = getattr(importlib.import_module(f"aotgaudi.doctor.hpu.probes.{module}"), function)
        document = {"values": dict(probe(**json.loads(arguments))), "problem": ""}
    except Exception as error:  # The edge of the process: the parent tells what went wrong.
        document = {"values": {}, "problem": one_line(error)}
    Path(result).write_text(json.dumps(document), encoding="utf-8")
