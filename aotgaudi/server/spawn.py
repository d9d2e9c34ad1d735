"""Starts the server's other processes: Python modules of ours, each with a socket to the one that starts it."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aotgaudi.child import python_command


def spawn(module: str, *arguments: str, kind: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Runs ``main()`` of `module` with FD and `arguments`; FD is a socket of `kind`, whose other end is returned, too.

    The process ignores Ctrl-C, which its parent obeys, and writes nothing to standard output.
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
    """Processes that are started inside ignore Ctrl-C from their first moment. Only the main thread can arrange that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
