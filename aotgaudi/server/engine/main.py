"""The engine's process, which the front starts before anything else; its arguments are FD and BEGAN.

FD is its socket to the front, BEGAN when the server began, in seconds of the machine's uptime. While the front finds out
what to serve, this process imports what it will need.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from typing import NoReturn

from aotgaudi.child import die_with_parent
from aotgaudi.phases import Phases, since
from aotgaudi.runtime.preload import begin_to_load_torch, leave_out_tracing


def main() -> NoReturn:
    """Runs until the front says to stop, or the engine has died; then exits."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    phases = Phases(since(float(sys.argv[2])))
    phases.add("engine_process", 0.0)
    gc.disable()  # What a start makes stays; `run_engine` has garbage looked for again.
    for number in (signal.SIGINT, signal.SIGTERM):  # The front says what they mean.
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(os.getppid(), signal.SIGKILL)  # Who is gone by now has closed the connection.
    begin_to_load_torch()
    leave_out_tracing()
    with phases.time("engine_import"):
        from aotgaudi.server.engine.channel import Channel, ChannelClosedError
        from aotgaudi.server.engine.worker import run_engine

    try:
        sys.exit(0 if run_engine(Channel(connection), phases) else 1)
    except ChannelClosedError:
        sys.exit(0)  # The front is gone.
