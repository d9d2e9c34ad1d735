"""What TileLang compiles in this process: kernels of SGLang, those of hyper-connections among them.

``JITKernel._compile_and_create_adapter`` is called where a kernel was not found in TileLang's cache. DeepGEMM's kernels are
compiled in C++, by nvcc or NVRTC, and nothing in Python is told: of those only the files are seen.
Sources: tilelang/jit/kernel.py; deepseek-ai/DeepGEMM, csrc/jit/compiler.hpp.
"""

from __future__ import annotations

import functools
import sys
import time
from types import ModuleType
from typing import Any

from aotgaudi_witness.report import Report
from aotgaudi_witness.witness import Witness

_COMPILE = "_compile_and_create_adapter"


def adapt(witness: Witness) -> None:
    """Adds the hook."""
    report = witness.report
    witness.hooks.add("tilelang.compile", "tilelang.jit.kernel", lambda module: _see_kernels(module, report))


def _see_kernels(module: ModuleType, report: Report) -> bool:
    kernel = getattr(module, "JITKernel", None)
    compile_kernel = getattr(kernel, _COMPILE, None)
    if compile_kernel is None:
        return False

    @functools.wraps(compile_kernel)
    def seen(self: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        name = _name(function)
        stack = report.stack(sys._getframe(1))
        report.refuse("a kernel compiled by TileLang", stack, name=name)
        started = time.monotonic()
        try:
            return compile_kernel(self, function, *args, **kwargs)
        finally:
            seconds = round(time.monotonic() - started, 3)
            report.emit("compile", what="tilelang", name=name, seconds=seconds, stack=stack)

    setattr(kernel, _COMPILE, seen)
    return True


def _name(function: Any) -> str:
    """Returns the symbol of a TIR function."""
    attributes = getattr(function, "attrs", None)
    return "a kernel" if attributes is None else str(attributes["global_symbol"])
