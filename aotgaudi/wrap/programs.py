"""What the processes of a wrapped server run and load, seen from outside, whatever language they are written in.

An agent sees what Python code starts in its own process. A shell script that runs a compiler, or a library in C that starts
one, has no agent. Here we see two things for every process of a server, at any depth:

* Programs that are started. Before the server's first instruction `exec_shim` has the kernel ask about ``execve`` and
  ``execveat`` (SECCOMP_RET_USER_NOTIF), in this process and all its descendants, and sends us the listener. A thread reads
  the words and lets the call go on. Nothing is refused. A kernel without this feature does not ask.
* Libraries that are mapped as code and were made after the server had started, wherever they lie.

Sources: seccomp_unotify(2), proc_pid_maps(5).
"""

from __future__ import annotations

import os
import re
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from aotgaudi import linux
from aotgaudi.wrap.witness import kind_of_command

_MAX_WORDS, _MAX_WORD_BYTES = 2048, 4096

_MAPPED = re.compile(r"([0-9a-f]+)-[0-9a-f]+ ..(.). ([0-9a-f]+) (\S+ [1-9]\d*) +(/.*)")
"""A line of /proc/PID/maps that has a file: address, whether it is code, offset, device and inode, name."""
_NO_FILES = ("/dev/", "/SYSV", "/[", "/anon_hugepage")
"""Devices, and memory that processes share or that lies in large pages: it has such a name and no file."""
_IN_MEMORY, _SHARED = "/memfd:", "/dev/shm/"  # noqa: S108, names in /proc/PID/maps
_DELETED = " (deleted)"
_JIT_MEMORY = re.compile(rf"{_IN_MEMORY}.*|.*/(ffi\w{{6}}|#\d+)")
"""Names of memory that a process fills with code by itself: a memfd, and a file without a name, or with libffi's.

libffi maps its closures like that where memory may not be both writable and executable (src/closures.c: memfd_create, then
O_TMPFILE, then mkostemp of ffiXXXXXX), and so do JITs that write code by one mapping and run it by another (Xbyak with
XBYAK_USE_MEMFD, .NET). It is code like that in memory without a name. A library is told apart by its first bytes.
"""
_ELF = b"\x7fELF"


@dataclass(frozen=True, slots=True)
class ProgramStart:
    """A process that becomes another program: its words, and its parent process."""

    pid: int
    parent: int
    words: tuple[str, ...]


class ProgramWatch(threading.Thread):
    """Lets programs start and records them. Ends with the last watched process, or with `close`."""

    def __init__(self) -> None:
        super().__init__(name="aotgaudi-programs", daemon=True)
        self._here, self._there = socket.socketpair()
        self._ending, self._ended = os.pipe()
        self._new: list[ProgramStart] = []
        self.is_watching = False

    @property
    def descriptor(self) -> int:
        """The socket for `exec_shim.send_listener`, in the process that becomes the server."""
        return self._there.fileno()

    def run(self) -> None:
        """Waits for the listener, however long a busy machine takes to start the server, then answers."""
        self._there.close()
        with self._here, suppress(OSError):
            has_come = self._waits_for(self._here.fileno())
            for listener in socket.recv_fds(self._here, 1, 1)[1] if has_come else ():
                self.is_watching = True
                self._answer(listener)
                os.close(listener)

    def take(self) -> list[ProgramStart]:
        """Returns the programs since the last call."""
        new = []
        with suppress(IndexError):
            while True:
                new.append(self._new.pop(0))
        return new

    def close(self) -> None:
        """Ends the thread, after the server has ended."""
        os.close(self._ended)
        if self.is_alive():
            self.join()
        os.close(self._ending)

    def _waits_for(self, descriptor: int) -> bool:
        """Waits until there is something to read. Returns False if there will be nothing, or once `close` was called."""
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        waiting.register(self._ending, select.POLLIN)
        events = dict(waiting.poll())
        return self._ending not in events and bool(events.get(descriptor, 0) & select.POLLIN)

    def _answer(self, listener: int) -> None:
        execveat, last = linux.call_numbers()["execveat"], None
        while self._waits_for(listener):
            with suppress(OSError):  # The process has gone.
                call = linux.next_call(listener)
                try:
                    start = _start(call.pid, call.arguments[2 if call.number == execveat else 1])
                except PermissionError:  # Another user's, or no ptrace: it goes on, unseen.
                    start, self.is_watching = None, False
                if start is not None and start != last:  # execvp tries each folder of PATH.
                    self._new.append(start)
                    last = start
                linux.let_go_on(listener, call)


class Compilers:
    """Finds compilers among the programs that are started. For one thread only."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}
        """Process id -> parent, of compilers and of processes that compilers started."""

    def among(
        self, starts: Iterable[ProgramStart], is_told: Callable[[ProgramStart], bool]
    ) -> list[ProgramStart]:
        """Returns the compilers that no agent reported, without what they start, and without those that are only probed."""
        found = []
        for start in starts:
            if start.parent in self._parents or self._parents.get(start.pid) == start.parent:
                self._parents[start.pid] = start.parent
                continue
            kind = kind_of_command(start.words)
            if kind != "other":
                self._parents[start.pid] = start.parent
            if kind == "compiler" and not is_told(start):
                found.append(start)
        return found


def _start(pid: int, address: int) -> ProgramStart | None:
    """Returns the program that a waiting process is about to become; None if it has gone. Raises PermissionError."""
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            words = tuple(_words(memory.fileno(), address))
        with open(f"/proc/{pid}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])
    except PermissionError:
        raise
    except (OSError, ValueError, OverflowError):
        return None
    return ProgramStart(pid, parent, words)


def _words(memory: int, address: int) -> Iterator[str]:
    for index in range(_MAX_WORDS):
        (pointer,) = struct.unpack("Q", os.pread(memory, 8, address + 8 * index).ljust(8, b"\0"))
        if not pointer:
            return
        yield os.fsdecode(_word(memory, pointer))


def _word(memory: int, pointer: int) -> bytes:
    """Reads a text, which may end just before a page that cannot be read."""
    found = b""
    while len(found) < _MAX_WORD_BYTES:
        at = pointer + len(found)
        piece = os.pread(memory, 4096 - at % 4096, at)
        found += piece.partition(b"\0")[0]
        if not piece or b"\0" in piece:
            break
    return found[:_MAX_WORD_BYTES]


@dataclass(frozen=True, slots=True)
class NewLibrary:
    """A process that has mapped the code of a new file. `why` there is no file to look at; empty if there is one."""

    pid: int
    why: str = ""


def new_libraries(pids: Iterable[int], since: float) -> dict[str, NewLibrary]:
    """Returns the files that processes have mapped as code and that were made `since` (epoch seconds)."""
    found: dict[str, NewLibrary] = {}
    known: dict[str, bool] = {}
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as maps:
            heads: dict[str, int] = {}
            files = set[tuple[str, str]]()
            for match in filter(None, map(_MAPPED.fullmatch, map(str.rstrip, maps))):
                if not int(match[3], 16):
                    heads.setdefault(match[4], int(match[1], 16))
                if match[2] == "x":
                    files.add((match[5], match[4]))
            for path, file in sorted(files):
                bare = path.removesuffix(_DELETED)
                if path != bare or bare.startswith(_IN_MEMORY):
                    why = _without_file(pid, bare, heads.get(file))
                    if why:
                        found.setdefault(bare, NewLibrary(pid, why))
                    continue
                if path not in known:
                    known[path] = _is_new(pid, path, since)
                if known[path]:
                    found.setdefault(path, NewLibrary(pid))
    return found


def _without_file(pid: int, name: str, head: int | None) -> str:
    """Returns why code that no file holds any more is a library's, whose file was most likely made for this process.

    `head` is where the file's first byte is mapped. Returns "" for memory that holds no library.
    """
    if name.startswith(_NO_FILES) and not name.startswith(_SHARED):
        return ""
    if _JIT_MEMORY.fullmatch(name) and head is not None and not _has_header(pid, head):
        return ""
    is_in_memory = name.startswith(_IN_MEMORY)
    return "it lies in memory, where no file can be compared" if is_in_memory else "its file has been removed"


def _has_header(pid: int, head: int) -> bool:
    """Whether a library begins there. True if the memory cannot be read."""
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            return os.pread(memory.fileno(), len(_ELF), head) == _ELF
    except (OSError, OverflowError):
        return True


def _is_new(pid: int, path: str, since: float) -> bool:
    """Whether a mapped library is new."""
    if path.startswith(_NO_FILES) and not path.startswith(_SHARED):
        return False
    try:
        place = f"/proc/{pid}/root{path}"
        status = os.stat(place)
        return status.st_ctime > since and _made_at(place, status) > since
    except OSError:  # It is another user's, or has gone.
        return False


def _made_at(path: str, status: os.stat_result) -> float:
    """Returns when a file was made or last written, in epoch seconds. A file's ctime is never earlier.

    Installers link files of a cache into environments. Making or removing a link elsewhere changes a file's ctime and
    nothing else. If the file system keeps no birth time, we return ctime all the same.
    """
    try:
        made = linux.birth_time(path)
    except OSError:
        return status.st_ctime
    written = status.st_mtime if status.st_mtime <= status.st_ctime else 0.0  # It can be set to any time.
    return max(made, written)
