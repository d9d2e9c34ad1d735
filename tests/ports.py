"""Ports for servers that tests start, and that must be told theirs: no two tests of this machine get the same one.

A port that was bound to 0 and let go is anybody's again: the kernel soon gives it to the next who asks, or to a connection
that somebody opens. So these are below the range from which the kernel chooses, and they are handed out in turn, by a
counter that all processes of a user share: a port comes again once all others have.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

FIRST, LAST = 12_000, 32_000
"""The kernel chooses from 32,768 on, unless an administrator has changed that (ip(7), ip_local_port_range)."""


def free_port() -> int:
    """Returns a port of the loopback address that nobody listens on, and that nobody else is given."""
    for _ in range(FIRST, LAST):
        port = _next()
        if _is_free(port):
            return port
    raise AssertionError(f"no port from {FIRST} to {LAST} is free")


def _next() -> int:
    # Not in $TMPDIR, which two runs may have set differently.
    path = Path("/tmp", f"aotgaudi-test-ports-{os.getuid()}")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        last = os.pread(descriptor, 16, 0)
        port = int(last) + 1 if last.isdigit() and FIRST <= int(last) < LAST else FIRST
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(port).encode(), 0)
        return port
    finally:
        os.close(descriptor)


def _is_free(port: int) -> bool:
    with socket.socket() as probing:
        try:
            probing.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
