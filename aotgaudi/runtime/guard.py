"""The guard: makes a process, or one thread of it, unable to compile, and counts whatever tried or did.

While armed it refuses to start a process (a compiler is one) and to import a compiler (dynamo, inductor, triton); where
dynamo is loaded already, tracing again is refused too (``torch.compiler.set_stance("fail_on_recompile")``).

Python cannot remove an audit hook: once armed, the hook stays for the life of the process. Disarmed, it lets everything
pass.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal

from aotgaudi.errors import CompileForbiddenError

Cause = Literal["first_use", "process", "import", "dynamo", "backend"]

CAUSES: Mapping[Cause, str] = {
    "first_use": "units compiled by the builder that was started for an entry that was missing",
    "process": "attempts to start a process, refused",
    "import": "attempts to import a compiler, refused",
    "dynamo": "graphs that torch.compile captured in this process",
    "backend": "graphs that the device's compiler compiled in this process",
}
"""What can make the count of compilations rise. All are 0 under ``--require-warm`` unless something is wrong."""

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
"""Imported by multiprocessing when it first starts a process by a system call that raises no audit event."""

COMPILER_MODULES = ("torch._dynamo", "torch._inductor", "torch._export", "triton", "transformers")


class Guard:
    """Refuses to compile while it is armed, and counts compilations by cause. Thread-safe."""

    def __init__(self) -> None:
        self._is_armed = self._is_hooked = False
        self._only_thread: int | None = None
        self._excused = threading.local()
        self._lock = threading.Lock()
        self._counts: Counter[Cause] = Counter()
        self._watched: dict[Cause, tuple[Callable[[], int], int]] = {}
        self.watch("dynamo", _num_dynamo_graphs)

    def arm(self, only_thread: int | None = None) -> None:
        """Refuses from now on: in the whole process, or in the thread with this identifier only.

        Whoever tries gets a CompileForbiddenError. A guard of one thread leaves the rest of the process alone: it does
        not forbid dynamo to trace again.
        """
        self._only_thread, self._is_armed = only_thread, True
        for cause, (count, _) in self._watched.items():
            self._watched[cause] = (count, count())
        if not self._is_hooked:
            self._is_hooked = True
            sys.addaudithook(self._audit)
            sys.meta_path.insert(0, _Finder(self))  # importlib.import_module raises no event.
        if only_thread is None:
            _set_stance("fail_on_recompile")

    def disarm(self) -> None:
        """Refuses nothing any more."""
        if self._is_armed and self._only_thread is None:
            _set_stance("default")
        self._is_armed = False

    @contextmanager
    def excusing(self) -> Iterator[None]:
        """Lets this thread start a process: the builder, where the server may have it started. Nests."""
        before = getattr(self._excused, "now", False)
        self._excused.now = True
        try:
            yield
        finally:
            self._excused.now = before

    def watch(self, cause: Cause, count: Callable[[], int]) -> None:
        """Adds to `cause` whatever `count`, which must never fall, rises by from now on (from arming, if that is later)."""
        self._watched[cause] = (count, count())

    def count(self, cause: Cause, num: int = 1) -> None:
        """Adds `num` compilations, done or refused."""
        with self._lock:
            self._counts[cause] += num

    def compilations(self) -> Mapping[Cause, int]:
        """Returns the count of every cause, zeros included."""
        watched = {cause: count() - start for cause, (count, start) in self._watched.items()}
        return {cause: self._counts[cause] + watched.get(cause, 0) for cause in CAUSES}

    def check_import(self, module: str) -> None:
        """Raises CompileForbiddenError for a module that compiles, or that starts processes."""
        if not self._is_in_force():
            return
        if _is_compiler(module):
            self._refuse("import", f"to import {module}")
        if module in PROCESS_MODULES:
            self._refuse("process", f"to start a process ({module})")

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "import":
            self.check_import(args[0])
        elif event in PROCESS_EVENTS and self._is_in_force() and not getattr(self._excused, "now", False):
            self._refuse("process", f"to start a process ({event} {args[0] if args else ''!r})")

    def _is_in_force(self) -> bool:
        return self._is_armed and self._only_thread in (None, threading.get_ident())

    def _refuse(self, cause: Cause, what: str) -> None:
        self.count(cause)
        raise CompileForbiddenError(f"refused while serving: an attempt {what}")


class _Finder:
    """Finds no module, but refuses those that the guard refuses."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Part of the import system's protocol."""
        self._guard.check_import(name)


def _is_compiler(module: str) -> bool:
    return module.startswith(COMPILER_MODULES) and any(
        module == name or module.startswith(f"{name}.") for name in COMPILER_MODULES
    )


def _num_dynamo_graphs() -> int:
    """How many graphs dynamo has captured in this process; 0 where it was never imported."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["stats"]["unique_graphs"])


def _set_stance(stance: str) -> None:
    """Says what dynamo does where it would trace again; nothing where it was never imported."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.set_stance(stance)
