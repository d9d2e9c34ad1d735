"""Steps of the lazy mode, and the late import of the backend (D-04).

Source: ``core/__init__.py:58-113`` of the bridge.
"""

from __future__ import annotations

import importlib._bootstrap as bootstrap
import sys
from typing import Any

from habana_frameworks.bridge.faults import has_fault
from habana_frameworks.torch.utils.internal import is_lazy

_BACKEND = "habana_frameworks.torch.dynamo.compile_backend.backends"


def mark_step(device_str: str = "", sync: bool = False) -> None:
    """Ends a graph of the lazy mode; otherwise nothing, without a word (``utils/internal.py``, ``lazy_only``)."""
    del device_str, sync


def import_compilers() -> None:
    """Registers ``hpu_backend``."""
    import habana_frameworks.torch.dynamo.compile_backend.backends


def import_hpu_partition() -> None:
    """Part of the bridge's names; the double's partition needs no registration."""


def _import_late() -> None:
    """Once an import from now on has loaded anything named after Dynamo, the backend is registered."""
    original = bootstrap._find_and_load  # type: ignore[attr-defined]
    depth, is_due = 0, False

    def find_and_load(name: str, import_: Any) -> Any:
        nonlocal depth, is_due
        depth, is_due = depth + 1, is_due or "dynamo" in name
        try:
            found = original(name, import_)
        finally:
            depth -= 1
        if is_due and not depth and bootstrap._find_and_load is find_and_load:  # type: ignore[attr-defined]
            bootstrap._find_and_load = original  # type: ignore[attr-defined]
            if _BACKEND not in sys.modules and not has_fault("not-registered"):
                import_compilers()
                import_hpu_partition()
        return found

    bootstrap._find_and_load = find_and_load  # type: ignore[attr-defined]


def _begin() -> None:
    if is_lazy():
        return
    import torch._dynamo  # The bridge loads it in this mode.

    assert "torch._dynamo" in sys.modules
    _import_late()


__all__ = ["import_compilers", "import_hpu_partition", "mark_step"]
