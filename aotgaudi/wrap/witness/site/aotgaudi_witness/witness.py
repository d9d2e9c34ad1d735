"""The witness of one process: its hooks, the thread that looks at the state, what is written first and last."""

from __future__ import annotations

import atexit
import os
import platform
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from aotgaudi_witness.audit import Audit, see_multiprocessing
from aotgaudi_witness.hooks import Hooks, Status
from aotgaudi_witness.process import Started, command, forked, here, role_of
from aotgaudi_witness.report import Report
from aotgaudi_witness.settings import FLUSH, Settings, State
from aotgaudi_witness.stacks import told_arguments

Counters = Callable[[], Mapping[str, int]]


class Witness:
    """Of one process, and of its children by fork, each of which writes a file of its own."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._state = State(settings.state)
        self.report = Report(settings, self._state)
        self._audit = Audit(self.report, self._leave)
        self.hooks = Hooks(self._hooks_changed, self.report.fault)
        self._counters: list[Counters] = []
        self._flushes: list[Callable[[], None]] = []
        self._counted: dict[str, int] = {}
        self._byte = ""
        self._has_greeted = self._has_ended = False

    def count(self, counters: Counters) -> None:
        """Reports numbers that the guest counts: whenever they have changed, and at the end."""
        self._counters.append(counters)

    def flush(self, flush: Callable[[], None]) -> None:
        """Calls `flush` when caches that are written late are to be written."""
        self._flushes.append(flush)

    def begin(self) -> None:
        """Hooks into the process, says so before anything else, and looks at the state from now on."""
        self.hooks.set("fork_exec", see_multiprocessing(self._audit))
        self._audit.begin()
        self.hooks.set("audit", True)
        self.hooks.set("state", self._state.is_told())
        self._greet(here(), command())
        for variable, mistake in self.settings.mistakes.items():
            self.report.fault(variable, mistake)
        self.hooks.begin()
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self._end)
        self._end_with_multiprocessing()
        self._start_looking()

    def _greet(self, started: Started, argv: Sequence[str]) -> None:
        self._byte = self._state.read()
        self.report.emit(
            "hello",
            ppid=os.getppid(),
            role=role_of(started.name, argv, started.target),
            name=started.name,
            of=started.parent,
            python=platform.python_version(),
            hooks=self.hooks.status,
            argv=told_arguments(command()),
        )
        self._has_greeted = True

    def _end_with_multiprocessing(self) -> None:
        """Its forked children end without what atexit calls, but call its own finalizers."""
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.Finalize(None, self._end, exitpriority=-1000)

    def _forked(self) -> None:
        """In a child by fork: its own file, its own thread. Nothing of this for a child that only executes a program."""
        self.report.renew()
        self._audit.forget()
        self._counted, self._has_ended = {}, False
        started = forked()
        if started is not None:
            self._greet(started, ())
            util = sys.modules.get("multiprocessing.util")
            if util is not None:  # It clears its finalizers before it runs the child, then calls this.
                util.register_after_fork(self, Witness._end_with_multiprocessing)
            self._start_looking()

    def _hooks_changed(self, status: dict[str, Status]) -> None:
        if self._has_greeted:
            self.report.emit("hooks", hooks=status)

    def _start_looking(self) -> None:
        """Starts the thread that looks until the process ends; again after a fork, where it is gone."""
        threading.Thread(target=self._keep_looking, name="aotgaudi-witness", daemon=True).start()

    def _keep_looking(self) -> None:
        pause = threading.Event()
        while True:
            self._look()
            pause.wait(self.settings.interval)

    def _look(self) -> None:
        """Looks once: at modules, counters and the state."""
        try:
            self.hooks.look()
            byte = self._state.read()
            if byte != self._byte:
                self._changed(byte)
            else:
                self._tell_counters()
        except Exception as error:  # the guest goes on; the witness says that it is blind
            self.report.fault("state", error)

    def _changed(self, byte: str) -> None:
        """Does what a new state asks for, tells what is counted, then says that it has been seen: not where that failed."""
        self._byte = byte
        self._audit.forget()
        if byte == FLUSH:
            for flush in self._flushes:
                flush()
        self._tell_counters()
        self.report.emit("state", to=byte)

    def _tell_counters(self) -> None:
        now: dict[str, int] = {}
        for counters in self._counters:
            now.update(counters())
        changed = {name: value for name, value in now.items() if self._counted.get(name, 0) != value}
        if changed:
            self._counted = now
            self.report.emit_values("counters", changed)

    def _end(self) -> None:
        try:
            self._tell_counters()
        except Exception as error:  # the process ends
            self.report.fault("state", error)
        self._say_bye()

    def _leave(self) -> None:
        """The process becomes another program, which does what atexit calls no more; whether it does is not known yet."""
        self._tell_counters()
        self._say_bye(why="exec")

    def _say_bye(self, **why: str) -> None:
        if not self._has_ended:
            self._has_ended = True
            self.report.emit("bye", **why)
