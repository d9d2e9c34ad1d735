"""The place of one run of a guest: a private directory that all of its files lie below.

::

    <root>/lock       taken by one run at a time; the kernel frees it, however that run ends
           cache/     the guest's caches: what is captured and restored
           tmp/       TMPDIR; short, for servers put sockets there
           home/      HOME while building
           model      a link to the model's directory, made by whoever starts the guest
           witness/   what is put on PYTHONPATH
           events/    what the witnesses say
           state      one byte: the phase
           allowed    the sealed paths, one a line; not in a cold run

The files that a guest compiles hold this path, so it is fixed: the root of the build is the root of every run. Where another
run has it, a directory beside it (``<root>.1`` ...) is taken, and the guest sees that one at the root, in a mount namespace
of its own. Everything is checked before anything is done: who could write there, whether libraries can be loaded from there,
how much room there is, and whether a socket's path fits (unix(7): 107 bytes).

A guest as our child: in a session of its own, its signals and exit code passed on, and nothing of it left behind.

* It is started through an entrance (`aotgaudi.wrap.exec_shim`), which dies with us.
* A keeper (`aotgaudi.wrap.reaper`) ends its whole family if we are killed.
* As PID 1, or where asked to, we adopt and reap what it orphans.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from aotgaudi.child import python_command
from aotgaudi.errors import SpecError, StoreError, UntrustedError, store_error
from aotgaudi.store.access import replaceable_in
from aotgaudi.wrap.processes import ProcessTree, adopt_orphans, send
from aotgaudi.wrap.reaper import GOODBYE
from aotgaudi.wrap.run_options import TERMINATION_SECONDS

DEFAULT_ROOT = Path("/run/aotgaudi")
MARK = "AOTGAUDI_PLACE"
"""The variable that every process of a guest has, with the directory that its place is in, as we see it."""
FOLDERS = ("cache", "tmp", "home", "witness", "events")

_MAX_SOCKET_BYTES, _SOCKET_NAME_BYTES = 107, 1 + 3 + 1 + 36
"""sun_path of unix(7); what servers put below the root: ``/tmp/`` and, in vLLM, a UUID."""
_MAX_ROOT_BYTES = _MAX_SOCKET_BYTES - _SOCKET_NAME_BYTES
_MAX_SIBLINGS = 32
_WAIT_SECONDS, _RETRY_SECONDS = 15.0, 0.1
"""How long the keeper of a run that was killed may take to end what it left."""
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True)
class Sandbox:
    """A place that is ours, empty but for its folders.

    Attributes:
        root: Where the guest sees it.
        here: Where we see it; another directory where the guest has a mount namespace of its own.
        descriptors: What holds the lock; who else has it open holds it, too.
    """

    root: Path
    here: Path
    descriptors: tuple[int, ...] = ()

    def folder(self, name: str) -> Path:
        """Returns where we see one of its folders or files."""
        return self.here / name

    @property
    def mark(self) -> str:
        """What stands in the environment of every process of the guest that runs here."""
        return f"{MARK}={self.here}"

    @property
    def state(self) -> Path:
        """Where we see the file with the state byte."""
        return self.here / "state"

    def set_state(self, byte: str) -> None:
        """Tells the witnesses the phase. Raises StoreError."""
        try:
            descriptor = os.open(self.state, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.pwrite(descriptor, byte.encode("ascii"), 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise store_error("write to", self.state, error) from error


@contextlib.contextmanager
def open_sandbox(
    root: Path = DEFAULT_ROOT,
    *,
    needed_bytes: int = 0,
    wait_seconds: float = _WAIT_SECONDS,
    keeps_caches: bool = False,
) -> Iterator[Sandbox]:
    """Takes the place at `root` for one run: empties it, makes its folders, and frees it at the end.

    The events of the last run stay until the next one; caches and temporary files go at the end, unless `keeps_caches`.

    Args:
        root: Where the guest is to see it; absolute.
        needed_bytes: What is to be put there.
        wait_seconds: How long to wait for a run that is ending, where no second one can be had.
        keeps_caches: Leave everything.

    Raises:
        SpecError: `root` cannot be a place (relative, too long, noexec), or is in use and no second one can be had.
        UntrustedError: somebody else could write there.
        StoreError: it cannot be made or emptied, or has too little room.
    """
    check_path(root)
    with contextlib.ExitStack() as stack:
        place = _take(root, stack, wait_seconds)
        _check_file_system(place.here, needed_bytes)
        _end_leftovers(place)
        try:
            _empty(place.here, everything=True)
            for name in FOLDERS:
                (place.here / name).mkdir(mode=0o700)
        except OSError as error:
            raise store_error("prepare", place.here, error) from error
        try:
            yield place
        finally:
            if not keeps_caches:
                with contextlib.suppress(OSError):
                    _empty(place.here, everything=False)


def check_path(root: Path) -> None:
    """Raises SpecError for a path that no place can have."""
    text = os.fsencode(root)
    where = f"--root {root}"
    if not root.is_absolute() or ".." in root.parts or root == Path("/"):
        raise SpecError(
            where, "is not the absolute path of a directory", f"for example --root {DEFAULT_ROOT}"
        )
    if len(text) > _MAX_ROOT_BYTES:
        raise SpecError(
            where,
            f"has {len(text)} bytes: the guest's sockets lie below it, and a socket's path has at most {_MAX_SOCKET_BYTES}",
            f"at most {_MAX_ROOT_BYTES} bytes, for example --root {DEFAULT_ROOT}",
        )
    if b":" in text or not str(root).isprintable():
        raise SpecError(where, "has a colon or a character that cannot be printed", "it is put on PYTHONPATH")


def _take(root: Path, stack: contextlib.ExitStack, wait_seconds: float) -> Sandbox:
    _prepare(root)
    deadline = time.monotonic() + wait_seconds
    while True:
        descriptor = _lock(root)
        if descriptor is not None:
            stack.callback(os.close, descriptor)
            return Sandbox(root, root, (descriptor,))
        problem = _namespace_problem(root)
        if not problem:
            return _take_sibling(root, stack)
        if time.monotonic() >= deadline:
            raise SpecError(
                f"--root {root}",
                f"is in use by another run, and this one cannot have a mount namespace of its own ({problem})",
                "wait for it, run each in a container of its own, or build a second capture with another --root",
            )
        time.sleep(_RETRY_SECONDS)


def _take_sibling(root: Path, stack: contextlib.ExitStack) -> Sandbox:
    for number in range(1, _MAX_SIBLINGS + 1):
        here = root.with_name(f"{root.name}.{number}")
        _prepare(here)
        descriptor = _lock(here)
        if descriptor is not None:
            stack.callback(os.close, descriptor)
            return Sandbox(root, here, (descriptor,))
    raise SpecError(
        f"--root {root}", f"is in use, and so are {_MAX_SIBLINGS} beside it", "end some of those runs"
    )


def _prepare(root: Path) -> None:
    """Makes the directory, or checks that it is ours alone."""
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
        status = root.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise SpecError(f"--root {root}", "is not a directory", "a directory, or a name that is free")
        if status.st_uid != os.geteuid():
            raise UntrustedError(
                f"{root} belongs to uid {status.st_uid}, who could put code there; it must belong to uid {os.geteuid()}"
                f" (chown it, or take another --root)"
            )
        parent = replaceable_in(root)
        if parent is not None:
            raise UntrustedError(
                f"everybody may replace {root}, for everybody may write to {parent} (chmod o-w {parent}, or +t)"
            )
        os.chmod(root, 0o700)
    except OSError as error:
        raise store_error("make", root, error) from error


def _lock(root: Path) -> int | None:
    """Returns a descriptor that holds the lock; None where another run has it."""
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
    return descriptor


def _namespace_problem(root: Path) -> str:
    """Why nothing can be mounted over `root` for one process alone; empty where it can."""
    words = python_command(
        "aotgaudi.wrap.exec_shim",
        *(str(os.getpid()), str(root.parent), str(root), "--", "/bin/true"),
        bare=True,
    )
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip().removeprefix("aotgaudi: ") or "refused"


def _check_file_system(here: Path, needed_bytes: int) -> None:
    try:
        system = os.statvfs(here)
    except OSError as error:
        raise store_error("look at", here, error) from error
    if system.f_flag & os.ST_NOEXEC:
        raise SpecError(
            f"--root {here}",
            "is mounted noexec: the guest could not load its libraries from there",
            "mount it with exec, or build and run with another --root",
        )
    free_bytes = system.f_bavail * system.f_frsize
    if free_bytes < needed_bytes + _SPARE_BYTES:
        raise StoreError(
            f"{here}: has {free_bytes} bytes free, {needed_bytes + _SPARE_BYTES} are needed"
            " (make room, or take another --root)"
        )


def _end_leftovers(place: Sandbox) -> None:
    """Ends a guest that outlived both its supervisor and its keeper: its files are about to go."""
    ProcessTree(None, place.mark).end(0.0)


def _empty(here: Path, *, everything: bool) -> None:
    for entry in list(os.scandir(here)):
        if entry.name == "lock" or not (everything or entry.name in ("cache", "tmp", "home")):
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


class Child:
    """A guest that runs. Use it as a context manager: at its end nothing of the guest is left. One thread only."""

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        place: Sandbox,
        *,
        adopts: bool = False,
        output: IO[Any] | int | None = None,
        grace_seconds: float = TERMINATION_SECONDS,
    ) -> None:
        """Starts `words` in `environment`, to which the mark is added.

        Args:
            words: The command; the first is looked up in the guest's own PATH.
            environment: The guest's, whole.
            place: What the guest sees as its root.
            adopts: Adopt and reap what it orphans. For a process that has no other children of its own.
            output: Where its standard output and error go; None: where ours go.
            grace_seconds: How long it has after SIGTERM, also where we are killed.
        """
        self._adopts, self._grace_seconds = adopts, grace_seconds
        if adopts:
            adopt_orphans()
        self._process = subprocess.Popen(
            python_command(
                "aotgaudi.wrap.exec_shim",
                *(str(os.getpid()), str(place.here), str(place.root), "--", *words),
                bare=True,
            ),
            env={**environment, MARK: str(place.here)},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
        )
        self.pid = self._process.pid
        try:
            self._keeper = _start_keeper(self.pid, place, grace_seconds)
        except OSError:
            ProcessTree(self.pid, place.mark).end(0.0, self._process.poll)
            raise
        strangers = frozenset({self._keeper.pid})
        self.family = ProcessTree(self.pid, place.mark, os.getpid() if adopts else 0, strangers)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def poll(self) -> int | None:
        """Returns what the guest ended with, 128 + n for signal n; None while it runs. Reaps what was adopted."""
        status = self._process.poll()
        if self._adopts:
            self._keeper.poll()
            self._reap()
        return None if status is None else exit_code(status)

    def send(self, number: int) -> None:
        """Passes a signal on to the process that was started; it knows its own."""
        if self._process.poll() is None:
            send(self.pid, number)

    def living(self) -> frozenset[int]:
        """Returns the guest's processes that live."""
        return self.family.living()

    def end(self, grace_seconds: float | None = None) -> int:
        """Ends the whole family: SIGTERM for the first process, SIGKILL for what is left; returns its exit code."""
        self.family.end(self._grace_seconds if grace_seconds is None else grace_seconds, self.poll)
        found = self.poll()
        return exit_code(self._process.wait()) if found is None else found

    def close(self) -> None:
        """Ends what still runs, and the keeper. Closing again does nothing."""
        if self._keeper.stdin is None or self._keeper.stdin.closed:
            return
        if self.living() or self._process.poll() is None:
            self.end()
        with contextlib.suppress(OSError):  # It has been killed.
            self._keeper.stdin.write(GOODBYE)
        with contextlib.suppress(OSError):
            self._keeper.stdin.close()
        self._keeper.wait()

    def _reap(self) -> None:
        """Waits for what was adopted and has ended, but not for the guest or the keeper, who are asked by name."""
        known = {self.pid, self._keeper.pid}
        with contextlib.suppress(ChildProcessError):
            while True:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is None or found.si_pid in known:
                    return
                os.waitpid(found.si_pid, 0)


def exit_code(status: int) -> int:
    """Returns what a shell would say: a status that is negative stands for a signal, and becomes 128 + n."""
    return status if status >= 0 else 128 - status


def _start_keeper(leader: int, place: Sandbox, grace_seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        python_command("aotgaudi.wrap.reaper", str(leader), place.mark, str(grace_seconds), bare=True),
        env={"PATH": os.defpath},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=place.descriptors,
        bufsize=0,
    )
