"""How our own small processes are started: with the standard library alone, untouched by the guest's environment."""

from __future__ import annotations

import sys
from pathlib import Path

_PACKAGES = str(Path(__file__).resolve().parents[2])


def boot(module: str) -> list[str]:
    """Returns the words that run ``main`` of a module of `aotgaudi.wrap.watch`; its arguments follow."""
    code = f"import sys; sys.path.insert(0, {_PACKAGES!r}); from aotgaudi.wrap.watch.{module} import main; main()"
    return [sys.executable, "-I", "-S", "-c", code]
