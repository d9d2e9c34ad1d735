"""The sandbox of a wrapped server: a private directory that holds all of its files, and the server as our child in it.

::

    <root>/lock       names the run that holds it; the kernel frees it, however that run ends
           cache/     the server's caches: what is captured and restored
           tmp/       TMPDIR; its path is short, because servers put sockets there
           home/      HOME while building
           model      a link to the model's directory
           witness/   the agent: an archive on PYTHONPATH
           events/    what the agents write
           state      one byte: the phase
           allowed    the sealed paths, one a line; absent in a cold run

The files that a server compiles contain the root's path, so every run uses the root of the build, one at a time. Before we
change anything, we check who could write there, whether libraries can be loaded from there, how much room is left, and
whether a socket's path fits (unix(7): 107 bytes).

The root is ours alone (mode 0700), or one of root's to which we may write, such as the ``emptyDir`` of a pod (0777, with
fsGroup 2777). Then each folder in it is ours alone.

The server starts through `aotgaudi.wrap.exec_shim`, which dies with us. If we are killed, the reaper
(`aotgaudi.wrap.process_tree`) ends everything that the server started.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from aotgaudi.child import python_command
from aotgaudi.errors import SpecError, StoreError, UntrustedError, store_error
from aotgaudi.files import own_directory
from aotgaudi.store.location import belongs_to_root, replaceable_in
from aotgaudi.wrap.events import printable
from aotgaudi.wrap.process_tree import GOODBYE, ProcessTree, adopt_orphans, send
from aotgaudi.wrap.programs import ProgramWatch
from aotgaudi.wrap.run_options import TERMINATION_SECONDS

DEFAULT_ROOT = Path("/run/aotgaudi")
MARK = "AOTGAUDI_PLACE"
"""The variable that marks all processes of a wrapped server. Its value is the sandbox's directory."""
FOLDERS = ("cache", "tmp", "home", "witness", "events")
_NAMES = (*FOLDERS, "model", "state", "allowed")
"""What we make in a root. In one that is not ours alone, nothing else is touched."""

_MAX_SOCKET_BYTES, _SOCKET_NAME_BYTES = 107, 1 + 3 + 1 + 36
"""The size of sun_path in unix(7), and what servers put below the root: ``/tmp/`` and, in vLLM, a UUID."""
_MAX_ROOT_BYTES = _MAX_SOCKET_BYTES - _SOCKET_NAME_BYTES
_WAIT_SECONDS, _RETRY_SECONDS = 15.0, 0.1
"""How long the reaper of a killed run may take to end what is left of it."""
_SPARE_BYTES = 64 << 20
_TAIL_BYTES = 1 << 16
_DRAIN_SECONDS = 1.0
_REAP_SECONDS = 10.0
"""How long the threads of a killed process may take to go, once its first one has gone."""


@dataclass(frozen=True)
class Sandbox:
    """A directory that is ours, empty except for its folders.

    Attributes:
        root: Its path.
        descriptor: The one that holds the lock. Every process that has it open holds it, too.
    """

    root: Path
    descriptor: int | None = None

    @property
    def mark(self) -> str:
        """The assignment in the environment of every process of the server."""
        return f"{MARK}={self.root}"

    def set_state(self, byte: str) -> None:
        """Tells the agents the phase. Raises StoreError."""
        path = self.root / "state"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.pwrite(descriptor, byte.encode("ascii"), 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise store_error("write to", path, error) from error


@contextlib.contextmanager
def open_sandbox(
    root: Path = DEFAULT_ROOT, *, needed_bytes: int = 0, wait_seconds: float = _WAIT_SECONDS
) -> Iterator[Sandbox]:
    """Takes the sandbox at `root` for one run: empties it, makes its folders, and frees it at the end.

    Caches and temporary files are removed at the end. The events stay until the next run, so that they can be explained.

    Args:
        root: Its path; absolute.
        needed_bytes: How much will be written there.
        wait_seconds: How long to wait for a run that is ending.

    Raises:
        SpecError: `root` cannot be used (relative, too long, noexec), or another run has it.
        UntrustedError: Another user could write there.
        StoreError: It cannot be made or emptied, or has too little room.
    """
    check_path(root)
    with contextlib.ExitStack() as stack:
        sandbox = _take(root, stack, wait_seconds)
        _check_file_system(root, needed_bytes)
        ProcessTree(None, sandbox.mark).end(0.0)  # A server that outlived its supervisor and its reaper.
        try:
            _empty(root, _NAMES if root.stat().st_uid != os.geteuid() else None)
            for name in FOLDERS:
                _make_folder(root / name)
        except OSError as error:
            raise store_error("prepare", root, error) from error
        try:
            yield sandbox
        finally:
            with contextlib.suppress(OSError):
                _empty(root, ("cache", "tmp", "home"))


def check_path(root: Path) -> None:
    """Raises SpecError if a sandbox cannot have this path."""
    text = os.fsencode(root)
    where = f"--root {root}"
    if not root.is_absolute() or ".." in root.parts or root == Path("/"):
        raise SpecError(
            where, "is not the absolute path of a directory", f"for example --root {DEFAULT_ROOT}"
        )
    if len(text) > _MAX_ROOT_BYTES:
        raise SpecError(
            where,
            f"has {len(text)} bytes: the server's sockets lie below it, and a socket's path has at most {_MAX_SOCKET_BYTES}",
            f"at most {_MAX_ROOT_BYTES} bytes, for example --root {DEFAULT_ROOT}",
        )
    if b":" in text or not str(root).isprintable():
        raise SpecError(where, "has a colon or a character that cannot be printed", "it is put on PYTHONPATH")
    if any(character in " ,'\"\\" for character in str(root)):
        raise SpecError(
            where, "has a space, a comma, a quote or a backslash", "servers put it into commands of compilers"
        )


def _take(root: Path, stack: contextlib.ExitStack, wait_seconds: float) -> Sandbox:
    _prepare(root)
    deadline = time.monotonic() + wait_seconds
    while True:
        descriptor = _lock(root)
        if descriptor is not None:
            stack.callback(os.close, descriptor)
            return Sandbox(root, descriptor)
        if time.monotonic() >= deadline:
            raise SpecError(
                f"--root {root}",
                f"is in use by another run: {_holder(root)}",
                "wait for it, run each in its own container, or build a second capture with another --root",
            )
        time.sleep(_RETRY_SECONDS)


def _prepare(root: Path) -> None:
    """Makes the directory, or checks that only we can use it, or that it is a volume of root's."""
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        is_ours = own_directory(root)
        status = root.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise SpecError(f"--root {root}", "is not a directory", "a directory, or a name that is free")
        is_shared = bool(status.st_mode & (stat.S_IWOTH | stat.S_IWGRP))
        if not is_ours and not (belongs_to_root(root, status) and is_shared):
            raise UntrustedError(
                f"{root} belongs to uid {status.st_uid}, who could put code there; it must belong to uid {os.geteuid()},"
                f" or to root and be writable (chown it, or take another --root)"
            )
        parent = replaceable_in(root, belongs_to_root)
        if parent is not None:
            raise UntrustedError(
                f"everybody may replace {root}, for everybody may write to {parent} (chmod o-w {parent}, or +t)"
            )
    except OSError as error:
        raise store_error("make", root, error) from error


def _make_folder(path: Path) -> None:
    if not own_directory(path):
        raise UntrustedError(
            f"{path} is not a directory of uid {os.geteuid()}: others could put code there"
            " (empty the volume, or take another --root)"
        )


def _lock(root: Path) -> int | None:
    """Returns a descriptor that holds the lock; None if another run holds it."""
    try:
        descriptor = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise store_error("lock", root, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        os.close(descriptor)
        raise store_error("lock", root, error) from error
    with contextlib.suppress(OSError):  # A full disk: the run goes on, and its lock has no name.
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()}".encode("ascii"), 0)
    return descriptor


def _holder(root: Path) -> str:
    """Returns which run holds the lock, as it says itself."""
    try:
        return (root / "lock").read_text("ascii") or "an unknown process"
    except (OSError, ValueError):
        return "an unknown process"


def _check_file_system(root: Path, needed_bytes: int) -> None:
    try:
        system = os.statvfs(root)
    except OSError as error:
        raise store_error("look at", root, error) from error
    if system.f_flag & os.ST_NOEXEC:
        raise SpecError(
            f"--root {root}",
            "is mounted noexec: the server could not load its libraries from there",
            "mount it with exec, or build and run with another --root",
        )
    free_bytes = system.f_bavail * system.f_frsize
    if free_bytes < needed_bytes + _SPARE_BYTES:
        raise StoreError(
            f"{root}: has {free_bytes} bytes free, {needed_bytes + _SPARE_BYTES} are needed"
            " (make room, or take another --root)"
        )


def _empty(root: Path, names: Collection[str] | None) -> None:
    """Removes the entries with these `names`; None: all but the lock."""
    for entry in list(os.scandir(root)):
        if entry.name == "lock" or (names is not None and entry.name not in names):
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


class Child:
    """A wrapped server that runs in a sandbox. A context manager: at its end nothing of the server is left. One thread only.

    The server has its own session. As PID 1, or if `adopts`, we adopt and reap its orphans.
    """

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        sandbox: Sandbox,
        *,
        adopts: bool = False,
        output: IO[Any] | None = None,
        termination_seconds: float = TERMINATION_SECONDS,
    ) -> None:
        """Starts `words` in `environment`, to which the mark is added.

        Args:
            words: The command; its first word is looked up in the server's PATH.
            environment: The server's whole environment.
            sandbox: The directory that is its root.
            adopts: Whether to adopt and reap the server's orphans. For a process that has no other children.
            output: Where its standard output and error go; None: to our own, standard error through a `Relay`.
            termination_seconds: How long it has after SIGTERM, also if we are killed.
        """
        self._adopts, self._termination_seconds = adopts, termination_seconds
        if adopts:
            adopt_orphans()
        self.programs = ProgramWatch()
        self._relay = Relay(2) if output is None else None
        asker = self.programs.descriptor  # The socket by which the kernel asks us about programs.
        shim = python_command("aotgaudi.wrap.exec_shim", str(os.getpid()), str(asker), "--", bare=True)
        try:
            self._process = subprocess.Popen(
                [*shim, *words],
                env={**environment, MARK: str(sandbox.root)},
                start_new_session=True,
                pass_fds=(asker,),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if self._relay is None else self._relay.writer,
            )
        finally:
            if self._relay is not None:
                os.close(self._relay.writer)
                self._relay.start()
            self.programs.start()
        self.pid = self._process.pid
        try:
            self._reaper = _start_reaper(self.pid, sandbox, termination_seconds)
        except OSError:
            ProcessTree(self.pid, sandbox.mark).end(0.0, self._process.poll)
            raise
        strangers = frozenset({self._reaper.pid})
        self.tree = ProcessTree(self.pid, sandbox.mark, os.getpid() if adopts else 0, strangers)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def last_line(self) -> str:
        """Returns the last line of the server's standard error, after it has ended; empty if that went elsewhere."""
        return "" if self._relay is None else self._relay.last_line()

    def poll(self) -> int | None:
        """Returns the server's exit code, 128 + n for signal n; None while it runs. Reaps adopted processes."""
        status = self._process.poll()
        if self._adopts:
            self._reaper.poll()
            self._reap()
        return None if status is None else exit_code(status)

    def send(self, number: int) -> None:
        """Sends a signal to the server's first process, which passes it on to its children."""
        if self._process.poll() is None:
            send(self.pid, number)

    def end(self, termination_seconds: float | None = None) -> int:
        """Ends the whole tree, with SIGTERM for the first process and SIGKILL for what is left. Returns the exit code.

        That is 137, too, of a process that does not even go when it is killed.
        """
        seconds = self._termination_seconds if termination_seconds is None else termination_seconds
        self.tree.end(seconds, self.poll)
        with contextlib.suppress(subprocess.TimeoutExpired):  # It may wait for a device, and cannot even die.
            self._process.wait(_REAP_SECONDS)
        found = self.poll()
        return exit_code(-signal.SIGKILL) if found is None else found

    def close(self) -> None:
        """Ends what still runs, and the reaper. A second call does nothing."""
        if self._reaper.stdin is None or self._reaper.stdin.closed:
            return
        if self.tree.living() or self._process.poll() is None:
            self.end()
        with contextlib.suppress(OSError):  # It has been killed.
            self._reaper.stdin.write(GOODBYE)
        with contextlib.suppress(OSError):
            self._reaper.stdin.close()
        self._reaper.wait()
        self.programs.close()

    def _reap(self) -> None:
        """Reaps adopted processes that have ended, but not the server or the reaper, which `poll` asks for by id."""
        known = {self.pid, self._reaper.pid}
        with contextlib.suppress(ChildProcessError):
            while True:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is None or found.si_pid in known:
                    return
                os.waitpid(found.si_pid, 0)


def exit_code(status: int) -> int:
    """Returns the exit code as a shell reports it: a negative status is a signal, and becomes 128 + n."""
    return status if status >= 0 else 128 - status


def _start_reaper(leader: int, sandbox: Sandbox, termination_seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        python_command("aotgaudi.wrap.process_tree", str(leader), sandbox.mark, str(termination_seconds)),
        env={"PATH": os.defpath},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=() if sandbox.descriptor is None else (sandbox.descriptor,),
        bufsize=0,
    )


def last_line(tail: bytes, secrets: Iterable[bytes] = ()) -> str:
    """Returns the last line of an output without `secrets`; empty if the output is empty."""
    for secret in secrets:
        tail = tail.replace(secret, b"***")
    lines = [line for line in tail.decode(errors="replace").splitlines() if line.strip()]
    return printable(lines[-1].strip()) if lines else ""


def tail_of(path: Path) -> bytes:
    """Returns the end of a log. Raises OSError."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read()


class Relay(threading.Thread):
    """Copies what is written to `writer` byte by byte, and keeps the end of it. Ends when all writers have closed."""

    def __init__(self, to: int) -> None:
        super().__init__(name="aotgaudi-output", daemon=True)
        self._reader, self.writer = os.pipe()
        self._to, self._tail = to, b""

    def run(self) -> None:
        """Copies everything. If our own output is gone, it keeps reading, so that the server does not block."""
        while piece := os.read(self._reader, _TAIL_BYTES):
            self._tail = (self._tail + piece)[-_TAIL_BYTES:]
            try:
                while piece:
                    piece = piece[os.write(self._to, piece) :]
            except OSError:
                continue
        os.close(self._reader)

    def last_line(self) -> str:
        """Returns the last line, once the writers have closed or after a short wait."""
        self.join(_DRAIN_SECONDS)
        return last_line(self._tail)
