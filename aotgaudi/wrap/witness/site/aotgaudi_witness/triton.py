"""What Triton compiles in this process.

``triton.knobs.compilation.listener`` is told of each kernel, and whether it came from Triton's cache on disk. (Its
``runtime.jit_post_compile_hook`` is called for those, too, so it proves no compilation.) Whoever listens already goes on
listening. Source: triton/compiler/compiler.py and knobs.py of 3.4 to 3.9.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from aotgaudi_witness.report import Report
from aotgaudi_witness.witness import Witness


def adapt(witness: Witness) -> None:
    """Adds the hook."""
    report = witness.report
    witness.hooks.add("triton.listener", "triton.knobs", lambda module: _listen(module, report))


def _listen(module: ModuleType, report: Report) -> bool:
    compilation: Any = getattr(module, "compilation", None)
    if not hasattr(compilation, "listener"):
        return False
    before = compilation.listener

    def listener(*, cache_hit: bool, **kwargs: Any) -> None:
        if before is not None:
            before(cache_hit=cache_hit, **kwargs)
        if not cache_hit:
            stack = report.stack(sys._getframe(1))
            name = _name(kwargs)
            report.emit(
                "compile", what="triton", name=name, seconds=_seconds(kwargs.get("times")), stack=stack
            )
            report.refuse("a kernel compiled by Triton", stack, name=name)

    compilation.listener = listener
    return True


def _name(kwargs: dict[str, Any]) -> str:
    metadata = kwargs.get("metadata")
    named = metadata.get("name") if isinstance(metadata, dict) else None
    return str(named or getattr(kwargs.get("src"), "name", "a kernel"))


def _seconds(times: Any) -> float:
    """Returns how long a compilation took; Triton counts microseconds."""
    total = getattr(times, "total", 0)
    return round(total / 1e6, 3) if isinstance(total, (int, float)) else 0.0
