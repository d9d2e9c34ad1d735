"""Hooks on modules of the guest, put in place when the guest imports them. Nothing of the guest is imported here.

A hook is found by feature, never by version: it is ``waiting`` until its module is there, then ``True`` if what it needs was
found, else ``False``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Union

WAITING = "waiting"
Status = Union[bool, str]
Install = Callable[[ModuleType], bool]


class Hooks:
    """Those of a process, by name. Thread-safe."""

    def __init__(
        self, changed: Callable[[dict[str, Status]], None], failed: Callable[[str, BaseException], None]
    ) -> None:
        """`changed` is called with every status when one has changed, `failed` when putting one in place raised."""
        self._changed, self._failed = changed, failed
        self._status: dict[str, Status] = {}
        self._waiting: dict[str, list[tuple[str, Install]]] = {}
        self._lock = threading.RLock()

    @property
    def status(self) -> dict[str, Status]:
        """The status of each."""
        return dict(self._status)

    def set(self, name: str, status: bool) -> None:
        """Says of a hook that needs no module whether it is there."""
        self._status[name] = status

    def add(self, name: str, module: str, install: Install) -> None:
        """Puts a hook on `module` in place, now or when it is imported. `install` returns whether it could."""
        self._status[name] = WAITING
        self._waiting.setdefault(module, []).append((name, install))

    def begin(self) -> None:
        """Looks at what is there already, and at all that is imported from now on."""
        sys.meta_path.insert(0, _Finder(self))
        self.look()

    def look(self) -> None:
        """Puts in place what waits for modules that are there: those that came in no ordinary way."""
        there = [(name, sys.modules[name]) for name in tuple(self._waiting) if name in sys.modules]
        self._install(
            (name, module)
            for name, module in there
            if not getattr(getattr(module, "__spec__", None), "_initializing", False)
        )

    def is_waiting_for(self, module: str) -> bool:
        """Whether something waits for this module."""
        return module in self._waiting

    def imported(self, name: str, module: ModuleType) -> None:
        """Puts in place what waited for `module`. Never raises."""
        self._install([(name, module)])

    def _install(self, modules: Iterable[tuple[str, ModuleType]]) -> None:
        with self._lock:
            before = self.status
            for name, module in modules:
                for hook, install in self._waiting.pop(name, ()):
                    self._status[hook] = self._try(hook, install, module)
            if self.status != before:
                self._changed(self.status)

    def _try(self, hook: str, install: Install, module: ModuleType) -> bool:
        try:
            return bool(install(module))
        except Exception as error:  # the guest goes on; the witness says that it is blind
            self._failed(hook, error)
            return False


class _Finder:
    """Finds nothing by itself: has the others find a module, and is told when that has been executed."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Part of the import system's protocol."""
        if not self._hooks.is_waiting_for(name):
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    self._tell(name, spec)
                    return spec
        return None

    def _tell(self, name: str, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._hooks.imported(name, module)

        try:
            loader.exec_module = exec_module
        except AttributeError:  # a loader that takes no attributes: `Hooks.look` finds the module later
            return
