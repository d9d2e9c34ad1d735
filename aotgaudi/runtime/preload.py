"""Makes importing torch take less time, in a process that only serves. Imports no torch."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

_OF_TRACING = ("torch._meta_registrations", "torch.export")
"""What ``import torch`` imports for those who trace: functions for tensors without data, and the exporter."""


def leave_out_tracing() -> None:
    """Has ``import torch`` leave out what only tracing needs: a quarter of its time.

    For a process of our own that only runs programs. Whoever traces in it gets torch's error that an operator has no such
    function, or that ``torch.export`` has no such attribute. Does nothing once torch is there.
    """
    if "torch" not in sys.modules:
        sys.modules.update({name: ModuleType(name) for name in _OF_TRACING})


def begin_to_load_torch() -> threading.Thread | None:
    """Loads torch's largest library on another thread, so that importing torch finds it there.

    To relocate it, and to run its initializers, takes a fifth of a second, which an import would spend with the
    interpreter's lock. Variables of OpenMP must be set before. Returns the thread; None where torch is not installed
    or lies elsewhere, which importing it will tell.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    library = Path(spec.origin).parent / "lib" / "libtorch_cpu.so"
    if not library.exists():
        return None
    dlopen = ctypes.CDLL(None).dlopen  # Unlike ctypes.CDLL(library), it lets go of the lock.
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    thread = threading.Thread(target=dlopen, args=(os.fsencode(library), os.RTLD_NOW), daemon=True)
    thread.start()
    return thread
