"""The engine's process: ``python -m aotgaudi.server.engine.main FD BEGAN``, which the front starts before anything else.

FD is its socket to the front, BEGAN when the server began, in seconds of the machine's uptime. While the front finds out
what to serve, this process imports what it will need.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys

from aotgaudi.child import die_with_parent
from aotgaudi.phases import Phases, since
from aotgaudi.runtime.preload import begin_to_load_torch, leave_out_tracing


def main(connection: socket.socket, began: float) -> int:
    """Returns what the process exits with, once the front says to stop, or the engine has died."""
    phases = Phases(since(began))
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
        return 0 if run_engine(Channel(connection), phases) else 1
    except ChannelClosedError:
        return 0  # The front is gone.


if (
    __name__ == "__main__"
):  # The connection stays open: a thread listens to it for as long as there is a process.
    inherited = socket.socket(fileno=int(sys.argv[1]))
    sys.exit(main(inherited, float(sys.argv[2])))
