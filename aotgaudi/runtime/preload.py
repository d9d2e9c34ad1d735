"""Loads torch's native library while Python modules are still being imported. Imports no torch."""

from __future__ import annotations

import ctypes
import os
import threading
from importlib.util import find_spec
from pathlib import Path


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
