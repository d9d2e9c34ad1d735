"""What is left when we are killed: a small process that ends the guest's whole family when the other end of a pipe goes.

``python -I -S -c BOOT LEADER MARK GRACE``, with the pipe as standard input. A byte on it says that all is well and that it
may go. It holds the lock of the place as long as it lives, so nobody takes the place of a guest that still runs. Standard
library only.
"""

from __future__ import annotations

import os
import signal
import sys

from aotgaudi.wrap.processes import ProcessTree

GOODBYE = b"."


def main() -> None:
    """Waits for the supervisor to go, however that happens, and sees to it that the guest does, too."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    leader, mark, grace_seconds = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    if os.read(0, 1) != GOODBYE:
        ProcessTree(leader, mark).end(grace_seconds)
