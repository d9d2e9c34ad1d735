"""The program of the engine process, which the API server starts first. Its arguments are FD and BEGAN.

FD is its socket to the API server. BEGAN is when the API server started, in seconds of the machine's uptime. While the API
server finds out what to serve, this process imports the modules that it will need.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from aotgaudi.child import die_with_parent
from aotgaudi.linux import dlopen
from aotgaudi.phases import Phases, since
from aotgaudi.runtime.seccomp import leave_others_alone

_OF_TRACING = ("torch._meta_registrations", "torch.export")
"""Imported by torch for tracing only: functions for tensors without data, and the exporter."""


def leave_out_tracing() -> None:
    """Makes ``import torch`` skip modules that only tracing needs, which saves a quarter of its time.

    Use it in processes that only run programs. Tracing in such a process fails: torch reports that an operator has no such
    function, or that ``torch.export`` has no such attribute. Does nothing if torch is imported already.
    """
    if "torch" not in sys.modules:
        sys.modules.update({name: ModuleType(name) for name in _OF_TRACING})


def begin_to_load_torch() -> threading.Thread | None:
    """Loads torch's largest library on another thread, so that ``import torch`` finds it loaded.

    Relocating and initializing it takes a fifth of a second, which ``import torch`` would spend holding the interpreter's
    lock. Set OpenMP's variables before. Returns the thread, or None if torch is not installed or has another layout (the
    import will report that).
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    library = Path(spec.origin).parent / "lib" / "libtorch_cpu.so"
    if not library.exists():
        return None
    thread = threading.Thread(target=dlopen, args=(library,), daemon=True)
    thread.start()
    return thread


def main() -> NoReturn:
    """Runs until the API server says to stop or the engine dies, and then exits."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    phases = Phases(since(float(sys.argv[2])))
    phases.add("engine_process", 0.0)
    gc.disable()  # A start makes little garbage. `run_engine` enables it again.
    for number in (signal.SIGINT, signal.SIGTERM):  # The API server handles them and says when to stop.
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(os.getppid(), signal.SIGKILL)  # A parent that is gone already has closed the connection.
    leave_others_alone()  # Before there is another thread.
    begin_to_load_torch()
    leave_out_tracing()
    with phases.time("engine_import"):
        from aotgaudi.server.engine.channel import Channel, ChannelClosedError
        from aotgaudi.server.engine.worker import run_engine

    try:
        sys.exit(0 if run_engine(Channel(connection), phases) else 1)
    except ChannelClosedError:
        sys.exit(0)  # The API server is gone.
