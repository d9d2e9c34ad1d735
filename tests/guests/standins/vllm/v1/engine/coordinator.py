"""As much of vLLM's module of that name as the fake server and the agent need."""

from __future__ import annotations

import contextlib
from multiprocessing.connection import Connection


class DPCoordinatorProc:
    """What the process of the data-parallel ranks' coordinator runs. It loads no plugins, as in vLLM 0.32."""

    @staticmethod
    def run_coordinator(connection: Connection) -> None:
        """Runs until the other end closes."""
        connection.send("ready")
        with contextlib.suppress(EOFError, OSError):
            connection.recv()
