"""What a worker process runs: jobs from a socket, one after the other, until the other end closes it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from aotgaudi.build.worker import start_worker
from aotgaudi.errors import AotGaudiError, CompileError

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serves the socket ``argv[1]``, with the toolchain's cache in ``argv[2]``, for the process ``argv[3]``."""
    descriptor, cache_dir, parent = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    os.set_inheritable(descriptor, False)  # Else a compiler would keep it open, and our death unseen.
    start_worker(cache_dir)
    _die_with(parent)
    with Connection(descriptor) as connection, contextlib.suppress(EOFError, ConnectionError):
        while True:
            function, arguments = connection.recv()
            connection.send(_outcome(function, arguments))


def _outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, Exception | None]:
    try:
        return function(*arguments), None
    except AotGaudiError as error:
        return None, error if _travels(error) else CompileError(str(error))
    except Exception as error:
        return None, CompileError(f"{type(error).__name__}: {error}")


def _travels(error: AotGaudiError) -> bool:
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    except Exception:
        return False
    return True


def _die_with(parent: int) -> None:
    """Lets the kernel kill us when our parent dies: a job that hangs would hold its unit's lock for ever."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
