"""The guard: makes a serving process unable to compile, and says so if something tries.

Three things are refused from the moment it is armed: starting a process (a compiler is one), importing a
compiler (dynamo, inductor, triton), and re-tracing where dynamo was loaded after all
(``torch.compiler.set_stance("fail_on_recompile")``). Audit hooks cannot be removed, so a guard is for the
life of the process.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from aotgaudi.errors import CompileForbiddenError

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
PROCESS_MODULES = ("multiprocessing.popen_spawn_posix", "multiprocessing.popen_forkserver")
"""What multiprocessing imports when it first starts a process by a system call that raises no event."""

COMPILER_MODULES = ("torch._dynamo", "torch._inductor", "torch._export", "triton", "transformers")


class Guard:
    """Counts what it has refused. Thread-safe."""

    def __init__(self) -> None:
        self._armed = False
        self._excused = threading.local()
        self.num_refused = 0

    def arm(self) -> None:
        """Refuses from now on. Raises CompileForbiddenError in whoever tries."""
        if not self._armed:
            self._armed = True
            sys.addaudithook(self._audit)
            sys.meta_path.insert(0, _Finder(self))  # importlib.import_module raises no event.
            _forbid_retracing()

    @contextmanager
    def excusing(self) -> Iterator[None]:
        """Lets this thread start a process: the builder, where the server may have one started. Nests."""
        before = getattr(self._excused, "now", False)
        self._excused.now = True
        try:
            yield
        finally:
            self._excused.now = before

    def check_import(self, module: str) -> None:
        """Raises CompileForbiddenError for a module that compiles, or that starts processes."""
        if _is_compiler(module):
            self._refuse(f"to import {module}")
        if module in PROCESS_MODULES:
            self._refuse(f"to start a process ({module})")

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "import":
            self.check_import(args[0])
        elif event in PROCESS_EVENTS and not getattr(self._excused, "now", False):
            self._refuse(f"to start a process ({event} {args[0] if args else ''!r})")

    def _refuse(self, what: str) -> None:
        self.num_refused += 1
        raise CompileForbiddenError(f"refused while serving: an attempt {what}")


class _Finder:
    """Finds nothing, and refuses what the guard refuses."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Part of the import system's protocol."""
        self._guard.check_import(name)


def _is_compiler(module: str) -> bool:
    return module.startswith(COMPILER_MODULES) and any(
        module == name or module.startswith(f"{name}.") for name in COMPILER_MODULES
    )


def _forbid_retracing() -> None:
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.set_stance("fail_on_recompile")
