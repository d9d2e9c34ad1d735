"""What serving asks of the kernel: filters of system calls, sealed memory that code can be mapped from, and open files."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import subprocess
from collections.abc import Iterator

from aotgaudi.child import python_command
from aotgaudi.doctor.machine_finding import MachineFinding
from aotgaudi.runtime.seccomp import forbid_processes
from aotgaudi.server.front.limits import DEFAULT_MAX_CONNECTIONS
from aotgaudi.store.memfd import SEALS

_SECONDS = 60.0

MANY_FILES = DEFAULT_MAX_CONNECTIONS + 1024
"""As many connections as a server takes by default, and the objects of a large bundle while it is loaded."""


def kernel_findings() -> Iterator[MachineFinding]:
    """Yields what is found. A process of its own tries the filter, which nobody could take off again."""
    yield of_filter(python_command("aotgaudi.doctor.kernel"))
    yield of_sealed_memory()
    yield of_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def of_filter(command: list[str]) -> MachineFinding:
    """Whether the kernel can be told to refuse processes; `command` tells it, and ends with 0 if it was."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        problem = (
            "" if done.returncode == 0 else (done.stderr.splitlines() or ["it ended without a word"])[-1]
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if not problem:
        return MachineFinding("seccomp", "ok", "the kernel refuses to start processes for a server")
    return MachineFinding(
        "seccomp",
        "warning",
        f"no filter can be set, so that a server's guard is its hook in Python alone: {problem}",
        "a container profile that allows seccomp(2)",
    )


def of_sealed_memory() -> MachineFinding:
    """Whether code can be loaded as a server does it: from anonymous memory that is sealed."""
    try:
        descriptor = os.memfd_create("doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.write(descriptor, b"\0")
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            mmap.mmap(descriptor, 1, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
        finally:
            os.close(descriptor)
    except OSError as error:
        remedy = "a kernel and a container that allow memfd_create(2), seals, and code in such memory"
        return MachineFinding(
            "sealed memory", "error", f"cannot be used: {error.strerror}", remedy, ("serve",)
        )
    return MachineFinding("sealed memory", "ok", "objects can be sealed and code mapped from them")


def of_open_files(hard_limit: int) -> MachineFinding:
    """Whether a server may open as many files as it would like to."""
    if hard_limit == resource.RLIM_INFINITY:
        return MachineFinding("open files", "ok", "no limit")
    if hard_limit >= MANY_FILES:
        return MachineFinding("open files", "ok", f"{hard_limit} at most")
    return MachineFinding(
        "open files",
        "warning",
        f"{hard_limit} at most: a server then takes fewer connections, and a large bundle may not load",
        f"{MANY_FILES} (`ulimit -Hn`, LimitNOFILE=, --ulimit nofile=)",
    )


def main() -> None:
    """In a process of its own: has the kernel refuse processes. Raises TargetError where it cannot."""
    forbid_processes()
