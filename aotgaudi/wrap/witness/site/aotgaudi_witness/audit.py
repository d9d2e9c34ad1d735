"""What Python itself tells of a process: programs that are started, files written, code loaded (PEP 578).

The hook sees everything that Python code does by the standard library. It does not see what C code does by itself: files
that an extension opens, processes that it forks. It cannot be removed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

from aotgaudi_witness.commands import COMPILER, kind_of_command
from aotgaudi_witness.report import Report
from aotgaudi_witness.stacks import told_arguments

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_UNNAMED = getattr(os, "O_TMPFILE", 0)
"""Makes a file without a name, which leaves nothing. One that is given a name later is told of as a link."""
_MOST_REMEMBERED = 20_000

Arguments = tuple[Any, ...]


class Audit:
    """Turns audit events into events of the witness. Thread-safe."""

    def __init__(self, report: Report, leaving: Callable[[], None]) -> None:
        """`leaving` is called before the process becomes another program."""
        self._report, self._leaving = report, leaving
        self._told: set[tuple[str, str, str]] = set()
        self._handlers: dict[str, Callable[[Arguments], None]] = {
            "subprocess.Popen": self._popen,
            "os.posix_spawn": lambda args: self.process(args[1]),
            "os.exec": self._exec,
            "os.spawn": lambda args: self.process(args[2]),
            "os.system": lambda args: self.process(["sh", "-c", os.fsdecode(args[0])]),
            "pty.spawn": lambda args: self.process([args[0]] if isinstance(args[0], str) else args[0]),
            "open": self._open,
            "os.rename": lambda args: self._written(args[1]),
            "os.link": lambda args: self._written(args[1]),
            "os.symlink": lambda args: self._written(args[1]),
            "os.truncate": lambda args: self._written(args[0]),
            "ctypes.dlopen": lambda args: self._loaded(args[0]),
            "import": lambda args: self._loaded(args[1]),
            "exec": self._executed,
        }

    def begin(self) -> None:
        """Looks from now on, for the life of the process."""
        handlers, failed, refusal = self._handlers, self._report.fault, self._report.refusal
        find = handlers.get

        def hook(event: str, args: Arguments) -> None:
            handler = find(event)
            if handler is not None:
                try:
                    handler(args)
                except refusal:
                    raise
                except Exception as error:  # the guest goes on; the witness says that it is blind
                    failed("audit", error)

        sys.addaudithook(hook)

    def forget(self) -> None:
        """Tells again what was told before: the guest is at something else now."""
        self._told = set()

    def process(self, argv: Sequence[Any]) -> None:
        """Tells of a process that is started; refuses a compiler where that is asked for."""
        words = [os.fsdecode(word) if isinstance(word, (bytes, os.PathLike)) else str(word) for word in argv]
        what = kind_of_command(words)
        stack = self._report.stack(sys._getframe(1))
        told = told_arguments(words)
        self._report.emit("process", argv=told, what=what, stack=stack)
        if what == COMPILER:
            self._report.refuse("a compiler", stack, argv=told)

    def _exec(self, args: Arguments) -> None:
        self.process(args[1])
        self._leaving()

    def _popen(self, args: Arguments) -> None:
        argv = args[1]
        self.process([argv] if isinstance(argv, (str, bytes, os.PathLike)) else argv)

    def _open(self, args: Arguments) -> None:
        path, _, flags = args
        if isinstance(flags, int) and flags & _WRITING and not (_UNNAMED and flags & _UNNAMED == _UNNAMED):
            self._written(path)

    def _written(self, path: Any) -> None:
        if isinstance(path, int):
            return
        found = self._report.below_root(os.path.abspath(os.fsdecode(path)))
        if found is not None and self._is_new("write", *found):
            self._report.emit("write", path=os.path.join(*found), root=found[0])

    def _executed(self, args: Arguments) -> None:
        code = args[0]
        if isinstance(code, CodeType):
            self._loaded(code.co_filename)

    def _loaded(self, path: Any) -> None:
        """Tells of a library, or of Python source, below a root; refuses what is not sealed where that is asked for."""
        if not isinstance(path, (str, bytes)):
            return
        found = self._report.below_root(os.fsdecode(path))
        if found is None:
            return
        root, relative = found
        is_sealed = self._report.is_sealed(root, relative)
        if self._is_new("load", root, relative):
            self._report.emit("load", path=os.path.join(root, relative), root=root, sealed=is_sealed)
        if not is_sealed and self._report.has_seal:
            stack = self._report.stack(sys._getframe(1))
            self._report.refuse("a file that is not sealed", stack, path=os.path.join(root, relative))

    def _is_new(self, kind: str, root: str, relative: str) -> bool:
        """Whether this was not told since the guest is at what it is at."""
        key = (kind, root, relative)
        if key in self._told:
            return False
        if len(self._told) < _MOST_REMEMBERED:
            self._told.add(key)
        return True


def see_multiprocessing(audit: Audit) -> bool:
    """Also tells of processes that multiprocessing starts: it calls a function in C that raises no audit event."""
    try:
        import _posixsubprocess
    except ImportError:  # no Unix
        return False
    fork_exec = _posixsubprocess.fork_exec

    def seen(*args: Any) -> int:
        # Until 3.11 subprocess calls it here too, and has raised its event before.
        if sys._getframe(1).f_globals.get("__name__") != "subprocess":
            audit.process(args[0])
        return fork_exec(*args)

    _posixsubprocess.fork_exec = seen
    return True
