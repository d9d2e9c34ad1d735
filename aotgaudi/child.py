"""What processes that we start owe the one that started them: to end with it, and to send errors that it can read."""

from __future__ import annotations

import ctypes
import os
import pickle
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, number: int) -> None:
    """Has the kernel send us a signal when our parent dies, and ends this process if `parent` is not our parent any more."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        sys.exit(128 + number)


def travels(error: BaseException) -> bool:
    """Whether an error can be sent to another process, and read there."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    except Exception:  # Whatever its class does.
        return False
    return True
