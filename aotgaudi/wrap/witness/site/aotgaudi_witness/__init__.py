"""Says what compiles in a server's processes: a plugin of vLLM and SGLang, which finds it in each of its processes.

`register` does nothing unless the environment asks for a witness (`aotgaudi_witness.settings`). It imports nothing but the
standard library, changes nothing that the server computes, and raises nothing, but where it is told to refuse.
"""

from __future__ import annotations

import os
import sys

__all__ = ["register"]

_registered: set[int] = set()  # the processes that this memory has been: one, and more after forks


def register() -> None:
    """Begins to witness this process: once, however often it is called; at most that. Never raises."""
    if not os.environ.get("AOTGAUDI_WITNESS") or _registered:
        return
    _registered.add(os.getpid())
    try:
        from aotgaudi_witness import habana, kernels, torch, vllm
        from aotgaudi_witness.settings import read_settings
        from aotgaudi_witness.witness import Witness

        settings = read_settings(os.environ)
        if settings is not None:
            witness = Witness(settings)
            for guest in (torch, kernels, vllm, habana):
                guest.adapt(witness)
            witness.begin()
    except Exception as error:  # the server goes on; whoever waits for this process to check in waits in vain
        sys.stderr.write(f"aotgaudi: no witness in process {os.getpid()}: {error!r}\n")
