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

Attempts to start a process or a program are counted if another process answers them in place of the kernel
(``SECCOMP_RET_USER_NOTIF``). The caller waits for its answer. This must be another process, because a thread that calls
``fork`` from Python holds the interpreter's lock while it waits. If that process ends, the kernel itself answers ENOSYS, so
nothing starts and nothing waits. The kernel itself refuses all other calls of the table.

Source: seccomp_unotify(2), and Documentation/userspace-api/seccomp_filter.rst of Linux. libseccomp would write the same
filter, but slim images lack its shared library.
"""

from __future__ import annotations

import errno
import os
import platform
import select
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from aotgaudi import linux
from aotgaudi.errors import TargetError

_USES_OF_OTHERS = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register"),
)

HandOver = Callable[[int, int], None]
"""Gives two descriptors to another process, which calls `refuse` with both whenever the first is readable, until this
process ends. Raises OSError if the other process is gone. The first descriptor is closed here afterwards, so that no call
waits for a process that has died."""


class RefusedCalls:
    """Counts the system calls that the answering process has refused to this process. Thread-safe.

    One attempt may be several calls, because C libraries and Python try another call when the first is refused.
    """

    def __init__(self) -> None:
        self._lock, self._num = threading.Lock(), 0
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def num(self) -> int:
        """Returns the number of refused calls up to now. It never falls."""
        with self._lock, suppress(BlockingIOError):
            self._num += os.eventfd_read(self.descriptor)
        return self._num


def refuse(listener: int, counter: int) -> bool:
    """Refuses one waiting system call of another process, and adds it to that process's `RefusedCalls`.

    Does not block. Returns False once the other process has ended. `listener` then stays readable for ever and is useless.
    """
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    events = dict(waiting.poll(0)).get(listener, 0)
    if not events & select.POLLIN:  # Before Linux 6.6, the ioctl would wait for ever.
        return not events
    with suppress(OSError):
        call = linux.next_call(listener)
        os.eventfd_write(counter, 1)
        linux.answer_call(listener, call, errno.EPERM)
    return True


def leave_others_alone() -> bool:
    """Keeps this thread, and all that it starts, from other processes' memory (``/proc/PID/mem``), files and threads.

    Cannot be undone. No filter of system calls can do this, because it does not see paths. But a process in a Landlock
    domain, root or not, may only look into processes of this domain or of one inside it (landlock(7), "Ptrace
    restrictions"). The domain forbids nothing else: its one rule allows to move files anywhere. Also sets ``no_new_privs``.

    Returns False if the kernel has no Landlock (before Linux 5.19), or a sandbox forbids it.
    """
    try:
        if linux.landlock_version() < 2:  # The first that governs moves.
            return False
        ruleset = linux.landlock_ruleset(linux.REFER)
    except OSError:
        return False
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    try:
        linux.landlock_allow_beneath(ruleset, linux.REFER, root)
        linux.set_no_new_privs()
        linux.landlock_restrict(ruleset)
    except OSError:
        return False
    finally:
        os.close(root)
        os.close(ruleset)
    return True


def forbid_processes(hand_over: HandOver | None = None, *, may_fork: bool = False) -> RefusedCalls | None:
    """Keeps all present and future threads of this process from starting processes and programs, and from using others.

    Cannot be undone. Also sets ``no_new_privs``, which the kernel requires. May be called on any thread.

    Args:
        hand_over: Passes the filter's descriptors to a process that answers and counts; None for no counting.
        may_fork: Allow this process to fork.

    Returns:
        The count of refused calls; None without counting, or if the kernel does not support it (before Linux 5.7; some
        sandboxes).

    Raises:
        TargetError: this machine cannot do it: another architecture or system, a 32-bit Python, an old kernel, or a sandbox
            that forbids it. No filter is in place then.
    """
    if linux.number_of("seccomp") is None or sys.platform != "linux" or sys.maxsize < 1 << 32:
        raise _impossible(f"no filter is known for {sys.platform} on {platform.machine()}")
    try:
        linux.set_no_new_privs()
        if hand_over is not None:
            with suppress(OSError):
                flags = linux.TSYNC | linux.NEW_LISTENER | linux.TSYNC_ESRCH
                return _handed_over(_install(linux.ASK, may_fork, flags), hand_over)
        result = _install(linux.DENY, may_fork, linux.TSYNC)
    except OSError as error:
        raise _impossible(f"{error.filename}: {error.strerror}") from error
    if result > 0:
        raise _impossible(f"thread {result} has a filter of its own")
    return None


def _handed_over(listener: int, hand_over: HandOver) -> RefusedCalls | None:
    refused = RefusedCalls()
    try:
        hand_over(listener, refused.descriptor)
    except OSError:
        return None
    finally:
        os.close(listener)
    return refused


def _install(deny: int, may_fork: bool, flags: int) -> int:
    answers = dict.fromkeys(_USES_OF_OTHERS, linux.DENY) | dict.fromkeys(("execve", "execveat"), deny)
    if may_fork:
        return linux.install_filter(answers, flags, foreign=deny)
    answers |= {"fork": deny, "vfork": deny, "clone3": linux.ABSENT}
    return linux.install_filter(answers, flags, foreign=deny, threads_only=deny)


def _impossible(reason: str) -> TargetError:
    return TargetError(f"the kernel cannot be told to refuse processes: {reason}")
