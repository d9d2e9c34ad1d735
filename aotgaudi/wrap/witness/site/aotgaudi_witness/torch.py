"""What torch does in this process: Dynamo traces, Inductor generates code.

* ``torch._dynamo.callback`` calls back when Dynamo begins to trace (not where a model is compiled ahead of time). That is a
  *trace*: where Inductor then finds its code in a cache, nothing is generated.
* ``torch._inductor.compile_fx.fx_codegen_and_compile`` is called where Inductor did not find it. It is a module's function
  that its module calls by name, so it can be replaced.
* ``torch._dynamo.utils.counters`` is counted by torch itself: hits and misses of its caches.

Sources: those three modules of torch 2.13.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from aotgaudi_witness.report import Report
from aotgaudi_witness.witness import Witness

_CODEGEN = "fx_codegen_and_compile"
_GROUPS = ("aot_autograd", "frames", "inductor", "stats")
_COUNTED = ("cache", "total", "ok", "calls_captured", "unique_graphs")


def adapt(witness: Witness) -> None:
    """Adds the hooks."""
    report = witness.report
    witness.hooks.add("torch.dynamo", "torch._dynamo.callback", lambda module: _see_traces(module, report))
    witness.hooks.add(
        "torch.codegen", "torch._inductor.compile_fx", lambda module: _see_codegen(module, report)
    )
    witness.hooks.add("torch.counters", "torch._dynamo.utils", lambda module: hasattr(module, "counters"))
    witness.count(_counters)


def _see_traces(module: ModuleType, report: Report) -> bool:
    register = getattr(getattr(module, "callback_handler", None), "register_start_callback", None)
    if register is None:
        return False

    def started(*args: Any) -> None:
        try:
            frame = sys._getframe(1)
            report.emit("trace", name=_traced(frame, args), stack=report.stack(frame))
        except Exception as error:  # the guest goes on; the witness says that it is blind
            report.fault("torch.dynamo", error)

    register(started)
    return True


def _traced(frame: Any, args: tuple[Any, ...]) -> str:
    """Returns ``module:line function`` of the code that Dynamo was given; what it calls it, where that is not found."""
    for _ in range(40):
        if frame is None:
            break
        code = frame.f_locals.get("code")
        if hasattr(code, "co_filename") and "_dynamo" in frame.f_code.co_filename:
            return f"{code.co_filename}:{code.co_firstlineno} {code.co_name}"
        frame = frame.f_back
    return " ".join(str(getattr(arg, "compile_id", arg)) for arg in args) or "unknown"


def _see_codegen(module: ModuleType, report: Report) -> bool:
    generate = getattr(module, _CODEGEN, None)
    if generate is None:
        return False

    @functools.wraps(generate)
    def seen(*args: Any, **kwargs: Any) -> Any:
        stack = report.stack(sys._getframe(1))
        name = f"graph {kwargs.get('graph_id', '')}".strip()
        report.emit("generate", what="inductor", name=name, stack=stack)
        report.refuse("code generation by Inductor", stack, name=name)
        return generate(*args, **kwargs)

    setattr(module, _CODEGEN, seen)
    return True


def _counters() -> Mapping[str, int]:
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None)
    if counters is None:
        return {}
    counted: dict[str, int] = {}
    for group in _GROUPS:
        for name, value in tuple(counters.get(group, {}).items()):
            if isinstance(value, int) and any(word in str(name) for word in _COUNTED):
                counted[f"torch.{group}.{name}"] = value
    return counted
