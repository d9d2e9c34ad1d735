"""What Numba compiles in this process: vLLM drafts by n-grams with it.

``numba.core.event`` broadcasts ``numba:compile`` before a function is compiled for types of arguments that it was not
compiled for before, and not where it is found in Numba's cache on disk. Source: that module and dispatcher.py of 0.65.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from aotgaudi_witness.report import Report
from aotgaudi_witness.witness import Witness

_COMPILE = "numba:compile"


def adapt(witness: Witness) -> None:
    """Adds the hook."""
    report = witness.report
    witness.hooks.add("numba.events", "numba.core.event", lambda module: _listen(module, report))


def _listen(module: ModuleType, report: Report) -> bool:
    kind: Any = getattr(module, "Listener", None)
    register = getattr(module, "register", None)
    if kind is None or register is None:
        return False

    class Listener(kind):  # type: ignore[misc]
        depth = 0
        """Of functions that are compiled for others. Numba compiles in one thread at a time."""

        def on_start(self, event: Any) -> None:
            if self.depth == 0:
                _tell(report, _name(event.data), report.stack(sys._getframe(1)))
            self.depth += 1

        def on_end(self, event: Any) -> None:
            self.depth -= 1

    register(_COMPILE, Listener())
    return True


def _tell(report: Report, name: str, stack: list[str]) -> None:
    report.emit("compile", what="numba", name=name, stack=stack)
    if report.is_live:  # Before, no file could have spared it.
        report.refuse("a function compiled by Numba", stack, name=name)


def _name(data: Any) -> str:
    """Returns ``module.function(types)``; less of it where Numba tells less."""
    told = data if isinstance(data, dict) else {}
    function = getattr(told.get("dispatcher"), "py_func", None)
    named = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', 'a function')}".lstrip(
        "."
    )
    return f"{named}({', '.join(map(str, told.get('args') or ()))})"
