"""The program that becomes the wrapped server: it arranges what must hold before the server's first instruction.

``main`` has the arguments PARENT HERE ROOT -- WORDS. It makes the process end with its parent, mounts HERE over ROOT in a
private mount namespace if the two differ, restores the default signals, and then becomes WORDS. It uses the standard library
only, and it is a separate program, because nothing of ours may run between fork and exec in a process with threads. Source:
unshare(2), mount(2), user_namespaces(7).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from aotgaudi.child import die_with_parent

NOT_FOUND, NOT_EXECUTABLE, NO_NAMESPACE = 127, 126, 125
"""Exit codes if the command cannot be run: as a shell's, and one for a namespace that was refused."""

_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000


def main() -> None:
    """Becomes the wrapped server, or exits with one line on standard error."""
    parent, here, root, _, *words = sys.argv[1:]
    if here != root:
        _bind(here, root)
    die_with_parent(int(parent), signal.SIGTERM)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec keeps what is ignored.
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        os.execvp(words[0], words)  # noqa: S606 - becoming what the user asked for is the point
    except FileNotFoundError:
        _fail(NOT_FOUND, f"{words[0]}: there is no such command")
    except OSError as error:
        _fail(NOT_EXECUTABLE, f"{words[0]}: cannot be run: {error.strerror}")


def _bind(here: str, root: str) -> None:
    """Mounts `here` over `root` for this process and what it starts; takes a user namespace if the mount needs one."""
    library = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.geteuid(), os.getegid()
    if library.unshare(_CLONE_NEWNS):
        if library.unshare(_CLONE_NEWUSER | _CLONE_NEWNS):
            _fail(NO_NAMESPACE, f"no private mount namespace: {os.strerror(ctypes.get_errno())}")
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    mounts = (
        (None, b"/", _MS_REC | _MS_PRIVATE),
        (os.fsencode(here), os.fsencode(root), _MS_BIND),
    )
    for source, target, flags in mounts:
        if library.mount(source, target, None, ctypes.c_ulong(flags), None):
            _fail(NO_NAMESPACE, f"{target.decode()}: cannot be mounted: {os.strerror(ctypes.get_errno())}")


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="ascii") as file:
            file.write(text)
    except OSError as error:
        _fail(NO_NAMESPACE, f"{path}: {error.strerror}")


def _fail(exit_code: int, message: str) -> None:
    sys.stderr.write(f"aotgaudi: {message}\n")
    sys.stderr.flush()
    os._exit(exit_code)
