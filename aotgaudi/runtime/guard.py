"""The guard, which keeps a process or one of its threads from compiling, and counts every attempt and every compilation.

It has two layers. The upper layer is in Python. An audit hook and a few replaced functions refuse, name and count attempts
to start a process (such as a compiler), to import a compiler (dynamo, inductor, triton, ...) and to compile TorchScript. If
dynamo is loaded already, it may not trace again (``torch.compiler.set_stance("fail_on_recompile")``). The lower layer is
optional. It is a seccomp filter, with which the kernel refuses to start processes for any code (`forbid_processes`).

Once armed, neither layer can be removed for the life of the process. The upper layer can be disarmed, and then refuses
nothing.
"""

from __future__ import annotations

import _posixsubprocess  # noqa: F401 - so that its entry point can be replaced
import functools
import logging
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any, Literal

from aotgaudi.errors import CompileForbiddenError, TargetError
from aotgaudi.runtime.seccomp import forbid_processes

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
"""Functions of the C library that start a process or a program. ctypes may not look them up."""

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
    # Used by multiprocessing for shared memory, locks, pools and fork servers.
    "_posixsubprocess": {"fork_exec": "process"},
    "torch._C": dict.fromkeys(_TORCHSCRIPT, "torchscript"),
}
"""C functions that raise no audit event, by module. Python code calls them as attributes of these modules and classes."""


logger = logging.getLogger(__name__)

_MEMORY = re.compile(r"/?/proc/[^/]+(/task/[^/]+)?/mem")

Cause = Literal["process", "import", "torchscript", "dynamo", "backend"]
Layer = Literal["seccomp", "hook"]
LAYERS: tuple[Layer, ...] = ("seccomp", "hook")
Seccomp = Literal["auto", "require", "off"]
"""Whether the kernel refuses processes: "auto" if it can, "require" always (otherwise arming fails), "off" never."""

CAUSES: Mapping[Cause, str] = {
    "process": "attempts of Python code to start a process, or to write to the memory of one, refused",
    "import": "attempts to import a compiler, refused",
    "torchscript": "attempts to trace, compile or load TorchScript, refused",
    "dynamo": "graphs that torch.compile captured in this process",
    "backend": "graphs that the device's compiler compiled in this process",
}
"""What the guard counts as compilations. All counts are 0 under ``--require-warm`` unless something is wrong."""

_PURPOSES: Mapping[Cause, str] = {"process": "start a process", "torchscript": "compile TorchScript"}
_INTERMEDIARIES = frozenset(
    {
        *("asyncio", "concurrent", "ctypes", "importlib", "multiprocessing", "os", "pty", "subprocess"),
        *("torch", "aotgaudi.runtime.guard"),
    }
)
"""Modules and packages that start processes or compile for other code. The guard reports their caller instead."""


class Guard:
    """Refuses attempts to compile while it is armed, and counts compilations by cause. Thread-safe."""

    def __init__(self) -> None:
        self._is_armed = self._is_hooked = False
        self._only_thread: int | None = None
        self._lock = threading.Lock()
        self._counts: Counter[Cause] = Counter()
        self._told: set[tuple[Cause, str]] = set()
        self._layers: tuple[Layer, ...] = ()
        self._watched: dict[Cause, tuple[Callable[[], int], int]] = {}
        self.watch("dynamo", _num_dynamo_graphs)

    def arm(self, only_thread: int | None = None, *, seccomp: Seccomp = "off") -> None:
        """Refuses from now on, in the whole process or only in the thread with this identifier.

        Attempts raise CompileForbiddenError. A guard of one thread does not keep dynamo from tracing again, since that would
        affect the other threads. `seccomp` always affects the whole process and remains after `disarm`. What the
        kernel refuses is not counted.

        Raises:
            TargetError: the kernel is required to refuse processes, and cannot.
        """
        self._only_thread, self._is_armed = only_thread, True
        for cause, (count, _) in self._watched.items():
            self._watched[cause] = (count, count())
        if not self._is_hooked:
            self._is_hooked = True
            sys.addaudithook(self._audit)
            sys.meta_path.insert(0, _Finder(self))  # importlib.import_module raises no event.
            self._replace_entry_points()
        if only_thread is None:
            _set_stance("fail_on_recompile")
        self._layers = (*self._sealed(seccomp), "hook")

    def _sealed(self, seccomp: Seccomp) -> tuple[Layer, ...]:
        """Installs the filter if `seccomp` asks for it. Returns the layer, or nothing if there is no filter."""
        if "seccomp" in self._layers or seccomp == "off":
            return tuple(layer for layer in self._layers if layer == "seccomp")
        try:
            forbid_processes()
        except TargetError as error:
            if seccomp == "require":
                raise
            logger.warning("%s; code that is not Python's could still start one", error)
            return ()
        return ("seccomp",)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The armed layers, the lower one first. Disarming does not change them."""
        return self._layers

    def disarm(self) -> None:
        """Refuses nothing from now on. A seccomp filter stays."""
        if self._is_armed and self._only_thread is None:
            _set_stance("default")
        self._is_armed = False

    def watch(self, cause: Cause, count: Callable[[], int]) -> None:
        """Adds the increase of `count` to `cause`, from now on or from arming if that is later. `count` must never fall."""
        self._watched[cause] = (count, count())

    def count(self, cause: Cause, num: int = 1) -> None:
        """Adds `num` compilations, done or refused."""
        with self._lock:
            self._counts[cause] += num

    def num_by_device(self) -> int:
        """Returns how many graphs the device has compiled (cause ``backend``), on a device that the guard cannot stop."""
        found = self._watched.get("backend")
        return 0 if found is None else found[0]() - found[1]

    def compilations(self) -> Mapping[Cause, int]:
        """Returns the count of every cause, zeros included."""
        watched = {cause: count() - start for cause, (count, start) in self._watched.items()}
        return {cause: self._counts[cause] + watched.get(cause, 0) for cause in CAUSES}

    def check_import(self, module: str) -> None:
        """Raises CompileForbiddenError if `module` is a compiler and the guard is in force."""
        is_compiler = module.startswith(COMPILER_MODULES) and any(
            module == name or module.startswith(f"{name}.") for name in COMPILER_MODULES
        )
        if is_compiler and self._is_in_force():
            self._refuse("import", f"to import {module}")

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "import":
            self.check_import(args[0])
        elif event == "open":
            if _writes_memory(*args) and self._is_in_force():
                self._refuse("process", f"to write to a process's memory ({args[0]!r})")
        elif event in PROCESS_EVENTS:
            self._check("process", f"{event} {args[0] if args else ''!r}")
        elif event.startswith("ctypes.dlsym") and _text(args[1]) in PROCESS_SYMBOLS:
            self._check("process", f"the C library's {_text(args[1])}")

    def _replace_entry_points(self) -> None:
        for module in ENTRY_POINTS.keys() & sys.modules.keys():
            for name, cause in ENTRY_POINTS[module].items():
                *path, attribute = name.split(".")
                owner = functools.reduce(getattr, path, sys.modules[module])
                checked = self._checked(getattr(owner, attribute), cause, f"{module}.{name}")
                setattr(owner, attribute, checked)

    def _checked(self, function: Callable[..., Any], cause: Cause, name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            self._check(cause, name)
            return function(*args, **kwargs)

        return checked

    def _check(self, cause: Cause, what: str) -> None:
        if self._is_in_force():
            self._refuse(cause, f"to {_PURPOSES[cause]} ({what})")

    def _is_in_force(self) -> bool:
        return self._is_armed and self._only_thread in (None, threading.get_ident())

    def _refuse(self, cause: Cause, what: str) -> None:
        """Counts an attempt and raises. Logs once for each cause and module, since the caller may hide the error."""
        self.count(cause)
        module = _whose()
        message = f"refused while serving: an attempt {what}, by {module}"
        if (cause, module) not in self._told:
            self._told.add((cause, module))
            logger.warning("%s", message)
        raise CompileForbiddenError(message)


class _Finder:
    """An import finder that finds no module, but lets the guard refuse compilers."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Part of the import system's protocol."""
        self._guard.check_import(name)


def _writes_memory(path: object, mode: object, flags: object) -> bool:
    """Whether a file is opened that is the memory of a process (``/proc/1/mem``), for more than reading."""
    del mode
    if not isinstance(path, (str, bytes)) or not isinstance(flags, int):
        return False
    return bool(flags & (os.O_WRONLY | os.O_RDWR)) and bool(_MEMORY.fullmatch(os.path.normpath(_text(path))))


def _text(name: str | bytes) -> str:
    return name.decode("ascii", "replace") if isinstance(name, bytes) else str(name)


def _whose() -> str:
    """Returns the module responsible for an attempt, which is the nearest caller that is not an intermediary."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "?"))
        if module not in _INTERMEDIARIES and module.partition(".")[0] not in _INTERMEDIARIES:
            return module
        frame = frame.f_back
    return "an unknown module"


def _num_dynamo_graphs() -> int:
    """Returns how many graphs dynamo has captured in this process; 0 if it was never imported."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["stats"]["unique_graphs"])


def _set_stance(stance: str) -> None:
    """Sets what dynamo does instead of tracing again. Does nothing if dynamo was never imported."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.set_stance(stance)
