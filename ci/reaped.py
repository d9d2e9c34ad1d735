"""Runs ``python ARGUMENTS`` and ends with its exit code, once no process is left of all that it started.

``python ci/reaped.py -m pytest ...``: when pytest is stopped, builds and their compilers go on. This process adopts them
(PR_SET_CHILD_SUBREAPER) and kills them. It passes on signals, except a Ctrl-C of the terminal, which reaches pytest as well.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_FROM_KERNEL = 0x80  # SI_KERNEL
_WATCHED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD}


def main() -> int:
    """Returns the exit code of the command; 128 and the signal's number if a signal ended it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    command = [sys.executable, *sys.argv[1:]]
    child = os.posix_spawn(sys.executable, command, os.environ, setsigmask=before)
    code = None
    while code is None:
        found = signal.sigwaitinfo(_WATCHED)
        if found.si_signo == signal.SIGCHLD:
            code = _reap(child)
        elif found.si_code != _FROM_KERNEL:
            os.kill(child, found.si_signo)
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with suppress(psutil.NoSuchProcess):  # It has ended, and its parent has waited for it.
                process.kill()
        psutil.wait_procs(left, timeout=1)
    return code


def _reap(main_pid: int) -> int | None:
    """Waits for all children that have ended. Returns the exit code of `main_pid` if it is one of them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == main_pid:
            ended = os.waitstatus_to_exitcode(status)
            code = ended if ended >= 0 else 128 - ended


if __name__ == "__main__":
    sys.exit(main())
