"""Starts the server's other processes. Each runs a Python module of ours and has a socket to its parent."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aotgaudi.child import python_command


def spawn(module: str, *arguments: str, kind: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Runs ``main()`` of `module` in a new process, and returns the process with one end of a socket of `kind`.

    The arguments of the process are the descriptor of the other end, and `arguments`. It ignores Ctrl-C, which its parent
    handles, and writes nothing to standard output.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with theirs, _interrupts_ignored():
        process = subprocess.Popen(
            python_command(module, str(theirs.fileno()), *arguments),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    return process, ours


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Makes processes that are started inside ignore Ctrl-C from the beginning. Works on the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
