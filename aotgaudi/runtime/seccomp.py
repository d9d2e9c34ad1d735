"""Makes the kernel refuse to start processes and to use others, by a seccomp filter over all threads of this process.

`leave_others_alone` refuses what no filter can see: opening another process's memory as a file.

The filter stays for the life of the process. It checks system calls in this order, and allows all others, including new
threads:

==================================================  =======  ====================================================
system call                                         answer   because
==================================================  =======  ====================================================
any, by another ABI (i386, x32, 32-bit ARM)         EPERM    its numbers mean other calls
ptrace, process_vm_readv, process_vm_writev,        EPERM    they make another process compile, or take its open files
pidfd_getfd
io_uring_setup, io_uring_enter, io_uring_register   EPERM    they let the kernel make calls that no filter sees
execve, execveat                                    EPERM    they start a program
fork, vfork                                         EPERM    they start a process
clone3                                              ENOSYS   its flags are behind a pointer, which a filter cannot
                                                             follow; C libraries fall back to clone
clone without CLONE_THREAD                          EPERM    it starts a process
==================================================  =======  ====================================================

The kernel answers by itself and tells nobody.

Source: Documentation/userspace-api/seccomp_filter.rst of Linux. libseccomp would write the same
filter, but slim images lack its shared library.
"""

from __future__ import annotations

import platform
import sys

from aotgaudi import linux
from aotgaudi.errors import TargetError

_USES_OF_OTHERS = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register"),
)


def leave_others_alone() -> bool:
    """Keeps this thread, and all that it starts, from other processes' memory (``/proc/PID/mem``), files and threads.

    Cannot be undone. No filter of system calls can do this, because it does not see paths. But a process in a Landlock
    domain, root or not, may only look into processes of this domain or of one inside it (landlock(7), "Ptrace
    restrictions"). The domain forbids nothing else: its one rule allows to move files anywhere. Also sets ``no_new_privs``.

    Returns False if the kernel has no Landlock (before Linux 5.19), or a sandbox forbids it.
    """
    try:
        linux.enter_landlock_domain()
    except OSError:
        return False
    return True


def forbid_processes(*, may_fork: bool = False) -> None:
    """Keeps all present and future threads of this process from starting processes and programs, and from using others.

    Cannot be undone. Also sets ``no_new_privs``, which the kernel requires. May be called on any thread.

    Unless it `may_fork`, this process may not even fork.

    Raises:
        TargetError: this machine cannot do it: another architecture or system, a 32-bit Python, an old kernel, or a sandbox
            that forbids it. No filter is in place then.
    """
    if not linux.call_numbers() or sys.platform != "linux" or sys.maxsize < 1 << 32:
        raise _impossible(f"no filter is known for {sys.platform} on {platform.machine()}")
    try:
        linux.set_no_new_privs()
        answers = dict.fromkeys((*_USES_OF_OTHERS, "execve", "execveat"), linux.DENY)
        if not may_fork:
            answers |= {"fork": linux.DENY, "vfork": linux.DENY, "clone3": linux.ABSENT}
        thread = linux.install_filter(
            answers, linux.TSYNC, foreign=linux.DENY, threads_only=linux.ALLOW if may_fork else linux.DENY
        )
    except OSError as error:
        raise _impossible(f"{error.filename}: {error.strerror}") from error
    if thread > 0:
        raise _impossible(f"thread {thread} has a filter of its own")


def _impossible(reason: str) -> TargetError:
    return TargetError(f"the kernel cannot be told to refuse processes: {reason}")
