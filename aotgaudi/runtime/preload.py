"""Makes importing torch faster in a process that only serves. Does not import torch itself."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

_OF_TRACING = ("torch._meta_registrations", "torch.export")
"""Imported by torch for tracing only: functions for tensors without data, and the exporter."""


def leave_out_tracing() -> None:
    """Makes ``import torch`` skip modules that only tracing needs, a quarter of its time.

    For our processes that only run programs. Tracing there fails with torch's error that an operator has no such function,
    or that ``torch.export`` has no such attribute. Does nothing if torch is imported already.
    """
    if "torch" not in sys.modules:
        sys.modules.update({name: ModuleType(name) for name in _OF_TRACING})


def begin_to_load_torch() -> threading.Thread | None:
    """Loads torch's largest library on another thread, so that importing torch finds it loaded.

    Relocating and initializing it takes a fifth of a second, which an import would spend holding the interpreter's lock.
    OpenMP's variables must be set before. Returns the thread; None if torch is not installed or has another layout, which
    the import will report.
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
