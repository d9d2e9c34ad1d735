"""What Triton, TileLang and Numba compile in this process.

* ``triton.knobs.compilation.listener`` is told of each kernel, and whether it came from Triton's cache on disk. (Its
  ``runtime.jit_post_compile_hook`` is called for those, too, so it proves no compilation.) Whoever listens already goes on
  listening. Source: triton/compiler/compiler.py and knobs.py of 3.4 to 3.9.
* ``JITKernel._compile_and_create_adapter`` is called where a kernel of SGLang, those of hyper-connections among them, was
  not found in TileLang's cache. DeepGEMM's kernels are compiled in C++, by nvcc or NVRTC, and nothing in Python is told: of
  those only the files are seen. Sources: tilelang/jit/kernel.py; deepseek-ai/DeepGEMM, csrc/jit/compiler.hpp.
* ``numba.core.event`` broadcasts ``numba:compile`` before a function is compiled for types of arguments that it was not
  compiled for before, and not where it is found in Numba's cache on disk. vLLM drafts by n-grams with it. No file could
  have spared it, so it is never refused. Source: that module and dispatcher.py of 0.65.
"""

from __future__ import annotations

import functools
import sys
import time
from types import ModuleType
from typing import Any

from aotgaudi_witness.report import Report
from aotgaudi_witness.witness import Witness

_TILELANG = "_compile_and_create_adapter"


def adapt(witness: Witness) -> None:
    """Adds the hooks."""
    for name, module_name, see in (
        ("triton.listener", "triton.knobs", _see_triton),
        ("tilelang.compile", "tilelang.jit.kernel", _see_tilelang),
        ("numba.events", "numba.core.event", _see_numba),
    ):
        witness.hooks.add(name, module_name, functools.partial(see, report=witness.report))


def _see_triton(module: ModuleType, report: Report) -> bool:
    compilation: Any = getattr(module, "compilation", None)
    if not hasattr(compilation, "listener"):
        return False
    before = compilation.listener

    def listener(*, cache_hit: bool, **kwargs: Any) -> None:
        if before is not None:
            before(cache_hit=cache_hit, **kwargs)
        if not cache_hit:
            stack = report.stack(sys._getframe(1))
            name = _triton_name(kwargs)
            report.emit(
                "compile", what="triton", name=name, seconds=_seconds(kwargs.get("times")), stack=stack
            )
            report.refuse("a kernel compiled by Triton", stack, name=name)

    compilation.listener = listener
    return True


def _triton_name(kwargs: dict[str, Any]) -> str:
    metadata = kwargs.get("metadata")
    named = metadata.get("name") if isinstance(metadata, dict) else None
    return str(named or getattr(kwargs.get("src"), "name", "a kernel"))


def _seconds(times: Any) -> float:
    """Returns how long a compilation took; Triton counts microseconds."""
    total = getattr(times, "total", 0)
    return round(total / 1e6, 3) if isinstance(total, (int, float)) else 0.0


def _see_tilelang(module: ModuleType, report: Report) -> bool:
    kernel = getattr(module, "JITKernel", None)
    compile_kernel = getattr(kernel, _TILELANG, None)
    if compile_kernel is None:
        return False

    @functools.wraps(compile_kernel)
    def seen(self: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        attributes = getattr(function, "attrs", None)  # of a TIR function
        name = "a kernel" if attributes is None else str(attributes["global_symbol"])
        stack = report.stack(sys._getframe(1))
        report.refuse("a kernel compiled by TileLang", stack, name=name)
        started = time.monotonic()
        try:
            return compile_kernel(self, function, *args, **kwargs)
        finally:
            seconds = round(time.monotonic() - started, 3)
            report.emit("compile", what="tilelang", name=name, seconds=seconds, stack=stack)

    setattr(kernel, _TILELANG, seen)
    return True


def _see_numba(module: ModuleType, report: Report) -> bool:
    kind: Any = getattr(module, "Listener", None)
    register = getattr(module, "register", None)
    if kind is None or register is None:
        return False

    class Listener(kind):  # type: ignore[misc]
        depth = 0
        """Of functions that are compiled for others. Numba compiles in one thread at a time."""

        def on_start(self, event: Any) -> None:
            if self.depth == 0:
                stack = report.stack(sys._getframe(1))
                report.emit("compile", what="numba", name=_numba_name(event.data), stack=stack)
            self.depth += 1

        def on_end(self, event: Any) -> None:
            self.depth -= 1

    register("numba:compile", Listener())
    return True


def _numba_name(data: Any) -> str:
    """Returns ``module.function(types)``; less of it where Numba tells less."""
    told = data if isinstance(data, dict) else {}
    function = getattr(told.get("dispatcher"), "py_func", None)
    named = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', 'a function')}".lstrip(
        "."
    )
    return f"{named}({', '.join(map(str, told.get('args') or ()))})"
