"""The names of what the guard refuses."""

from __future__ import annotations

import _posixsubprocess  # noqa: F401 - so that its entry point can be replaced
from collections.abc import Mapping
from typing import Literal

PROCESS_EVENTS = frozenset(
    {
        "subprocess.Popen",
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
        "pty.spawn",
    }
)
PROCESS_SYMBOLS = frozenset(
    {
        *("execl", "execle", "execlp", "execv", "execve", "execveat", "execvp", "execvpe", "fexecve"),
        *("fork", "forkpty", "popen", "posix_spawn", "posix_spawnp", "system", "vfork"),
    }
)
"""Functions of the C library that start a process or a program: ctypes may not look them up."""

COMPILER_MODULES = (
    "torch._dynamo",
    "torch._inductor",
    "torch._export",
    "triton",
    "transformers",
    "numba",
    "llvmlite",
)

_TORCHSCRIPT = (
    "_jit_script_compile",
    "_jit_script_compile_overload",
    "_jit_script_class_compile",
    "_jit_script_interface_compile",
    "_create_module_with_type",
    "_create_function_from_trace",
    "_create_function_from_trace_with_dict",
    "_create_function_from_graph",
    "_create_graph_by_tracing",
    "_import_ir_module_from_package",
    "import_ir_module",
    "import_ir_module_from_buffer",
    "CompilationUnit.__init__",
    "CompilationUnit.create_function",
    "CompilationUnit.define",
    "ScriptModule._create_method_from_trace",
    "ScriptModule._create_method_from_trace_with_dict",
    "ScriptModule._define",
)
ENTRY_POINTS: Mapping[str, Mapping[str, Literal["process", "torchscript"]]] = {
    # Of multiprocessing: shared memory, locks, pools, fork servers.
    "_posixsubprocess": {"fork_exec": "process"},
    "torch._C": dict.fromkeys(_TORCHSCRIPT, "torchscript"),
}
"""Functions in C that raise no audit event, by module. Python code calls them as attributes of these modules and classes."""


def is_compiler(module: str) -> bool:
    """Returns whether `module` is one of `COMPILER_MODULES`, or in one."""
    return module.startswith(COMPILER_MODULES) and any(
        module == name or module.startswith(f"{name}.") for name in COMPILER_MODULES
    )
