"""What all hooks of a process share: where events go, what lies below a root, what is refused."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any

from aotgaudi_witness.settings import LIVE, LOAD, Settings, State
from aotgaudi_witness.stacks import requests_of, requests_of_threads, stack_of
from aotgaudi_witness.write import EventFile, parts_of

_MOST_FAULTS = 100


class CompileForbidden(RuntimeError):  # noqa: N818 - it is what the guest's log shows
    """The guest was told not to compile, and not to load what is not sealed, and did."""


class Report:
    """Writes events. Thread-safe; raises nothing but `refusal`."""

    refusal = CompileForbidden

    def __init__(self, settings: Settings, state: State) -> None:
        self._settings, self._state = settings, state
        self._file = EventFile(settings.events, state.read)
        self._failing = threading.local()
        self._faults: set[tuple[str, str]] = set()

    def renew(self) -> None:
        """Begins a file of its own after a fork."""
        self._file.renew()
        self._failing = threading.local()
        self._faults = set()

    def emit(self, kind: str, **fields: Any) -> None:
        """Writes one event. Of one with a stack it says for which requests it was, once the server is live.

        If this thread computes none, these are the requests that another computes now: a bridge's counters are asked by a
        thread of ours.
        """
        if "stack" in fields and self._state.read() == LIVE:
            try:
                fields["requests"] = requests_of(sys._getframe(1)) or requests_of_threads(
                    sys._current_frames().values()
                )
            except Exception:  # their names changed, or the objects: the event says enough without
                fields["requests"] = []
        self._file.emit(kind, **fields)

    def emit_values(self, kind: str, values: Mapping[str, Any], **fields: Any) -> None:
        """Writes `values` as one event, or as several where there are many."""
        for part in parts_of(values):
            self._file.emit(kind, **fields, values=part)

    def fault(self, hook: str, error: BaseException | str) -> None:
        """Says that a hook failed, and may be blind: once for each way to fail. Never raises, nor calls itself."""
        if not getattr(self._failing, "now", False):
            self._failing.now = True
            try:
                text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
                if (hook, text) not in self._faults and len(self._faults) < _MOST_FAULTS:
                    self._faults.add((hook, text))
                    self._file.emit("fault", hook=hook, error=text)
            finally:
                self._failing.now = False

    def stack(self, frame: FrameType | None) -> list[str]:
        """Returns where something came from."""
        return stack_of(frame)

    def refuse(self, why: str, stack: list[str], **what: Any) -> None:
        """Says that something is refused, and raises `refusal`; does nothing where the guest may compile."""
        if self._state.read() == LOAD:
            self.emit("refused", **what, why=why, stack=stack)
            by = f" from {stack[0]}" if stack else ""
            named = " ".join(map(str, what.get("argv") or (what.get("path") or what.get("name", ""),)))
            raise CompileForbidden(f"aotgaudi: refused: {why}: {named[:300]}{by}")

    def below_root(self, path: str) -> tuple[str, str] | None:
        """Returns the root that an absolute path lies below, and the rest of it; None for the events themselves."""
        for root in self._settings.roots:
            if path.startswith(root) and path[len(root) : len(root) + 1] == os.sep:
                return (
                    None if path.startswith(self._settings.events + os.sep) else (root, path[len(root) + 1 :])
                )
        return None

    @property
    def has_seal(self) -> bool:
        """Whether it is known what is sealed."""
        return self._settings.allowed is not None

    def is_sealed(self, root: str, relative: str) -> bool:
        """Whether a file below a root is listed as sealed."""
        return os.path.join(root, relative) in (self._settings.allowed or ())
