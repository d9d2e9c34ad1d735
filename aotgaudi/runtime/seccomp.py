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

Sources: seccomp(2), seccomp_unotify(2), clone(2), and Documentation/userspace-api/seccomp_filter.rst of Linux. The numbers
are those of its headers asm/unistd_64.h, asm-generic/unistd.h, linux/audit.h, linux/bpf_common.h, linux/prctl.h and
linux/seccomp.h. libseccomp would write the same filter, but slim images lack its shared library.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import select
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from aotgaudi.errors import TargetError

_LOAD, _EQUALS, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
"""BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_JMP|BPF_JGE|BPF_K, BPF_JMP|BPF_JSET|BPF_K, BPF_RET|BPF_K."""
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
"""Offsets in struct seccomp_data. The last one is the low half of the 64-bit argument, since both ABIs are little-endian."""
_ALLOW, _ASK, _ERRNO = 0x7FFF0000, 0x7FC00000, 0x00050000
_DENY, _ABSENT = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS

_CLONE_THREAD = 0x00010000
_PR_SET_NO_NEW_PRIVS, _SECCOMP_SET_MODE_FILTER = 38, 1
_TSYNC, _NEW_LISTENER, _TSYNC_ESRCH = 1, 8, 16
_NOTIF_RECV, _NOTIF_SEND = 0xC0502100, 0xC0182101
_NOTIF_BYTES, _NOTIF_ID, _NOTIF_RESPONSE = 80, "=Q", "=QqiI"
"""struct seccomp_notif begins with its id. struct seccomp_notif_resp has id, value, negative error and flags."""

_Instruction = tuple[int, int, int, int]
"""struct sock_filter: code, instructions to skip if true and if false, operand."""


@dataclass(frozen=True, kw_only=True)
class _Abi:
    """The numbers of one machine's system calls. Those from `first_foreign` on belong to another ABI (x32's bit 30)."""

    audit_arch: int
    first_foreign: int
    seccomp: int
    others: tuple[int, ...]
    programs: tuple[int, ...]
    processes: tuple[int, ...]
    clone: int
    clone3: int


_ABIS = {
    "x86_64": _Abi(
        audit_arch=0xC000003E,
        first_foreign=0x40000000,
        seccomp=317,
        others=(101, 310, 311, 438, 425, 426, 427),  # In the order of the table above.
        programs=(59, 322),  # execve, execveat
        processes=(57, 58),  # fork, vfork
        clone=56,
        clone3=435,
    ),
    "aarch64": _Abi(
        audit_arch=0xC00000B7,
        first_foreign=0x40000000,
        seccomp=277,
        others=(117, 270, 271, 438, 425, 426, 427),
        programs=(221, 281),
        processes=(),
        clone=220,
        clone3=435,
    ),
}


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


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
    notification = bytearray(_NOTIF_BYTES)
    with suppress(OSError):
        fcntl.ioctl(listener, _NOTIF_RECV, notification)
        (call_id,) = struct.unpack_from(_NOTIF_ID, notification)
        os.eventfd_write(counter, 1)
        fcntl.ioctl(listener, _NOTIF_SEND, struct.pack(_NOTIF_RESPONSE, call_id, 0, -errno.EPERM, 0))
    return True


_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # On every architecture.
_RULESET_VERSION, _PATH_BENEATH, _REFER, _FIRST_ABI_WITH_REFER = 1, 1, 1 << 13, 2


def leave_others_alone() -> bool:
    """Keeps this thread, and all that it starts, from other processes' memory (``/proc/PID/mem``), files and threads.

    Cannot be undone. No filter of system calls can do this, because it does not see paths. But a process in a Landlock
    domain, root or not, may only look into processes of this domain or of one inside it (landlock(7), "Ptrace
    restrictions"). The domain forbids nothing else: its one rule allows to move files anywhere. Also sets ``no_new_privs``.

    Returns False if the kernel has no Landlock (before Linux 5.19), or a sandbox forbids it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long

    def call(number: int, *arguments: object) -> int:
        return int(libc.syscall(ctypes.c_long(number), *arguments))

    if (
        call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_RULESET_VERSION))
        < _FIRST_ABI_WITH_REFER
    ):
        return False
    access = struct.pack("=Q", _REFER)
    ruleset = call(_CREATE_RULESET, access, ctypes.c_size_t(len(access)), ctypes.c_uint(0))
    if ruleset < 0:
        return False
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    try:
        beneath = struct.pack("=Qi", _REFER, root)
        return (
            call(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), beneath, ctypes.c_uint(0))
            == 0
            and libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))) == 0
            and call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0)) == 0
        )
    finally:
        os.close(root)
        os.close(ruleset)


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
    abi = _ABIS.get(platform.machine())
    if abi is None or sys.platform != "linux" or sys.maxsize < 1 << 32:
        raise _impossible(f"no filter is known for {sys.platform} on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))) != 0:
        raise _impossible(f"prctl(PR_SET_NO_NEW_PRIVS): {os.strerror(ctypes.get_errno())}")
    if hand_over is not None:
        listener = _install(libc, abi, _filter(abi, _ASK, may_fork), _TSYNC | _NEW_LISTENER | _TSYNC_ESRCH)
        if listener >= 0:
            return _handed_over(listener, hand_over)
    result = _install(libc, abi, _filter(abi, _DENY, may_fork), _TSYNC)
    if result > 0:
        raise _impossible(f"thread {result} has a filter of its own")
    if result < 0:
        raise _impossible(f"seccomp: {os.strerror(ctypes.get_errno())}")
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


def _install(libc: ctypes.CDLL, abi: _Abi, instructions: Sequence[_Instruction], flags: int) -> int:
    """Calls seccomp(2) and returns its result."""
    encoded = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    libc.syscall.restype = ctypes.c_long
    numbers = map(ctypes.c_ulong, (abi.seccomp, _SECCOMP_SET_MODE_FILTER, flags))
    return int(libc.syscall(*numbers, ctypes.byref(_Program(len(instructions), encoded))))


def _filter(abi: _Abi, deny: int, may_fork: bool) -> Sequence[_Instruction]:
    """Returns the filter in classic BPF. Each jump either skips the return after it or does not."""
    denied = abi.programs if may_fork else (*abi.programs, *abi.processes)
    return (
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUALS, 1, 0, abi.audit_arch),
        (_RETURN, 0, 0, deny),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, abi.first_foreign),
        (_RETURN, 0, 0, deny),
        *(step for number in abi.others for step in ((_EQUALS, 0, 1, number), (_RETURN, 0, 0, _DENY))),
        *(step for number in denied for step in ((_EQUALS, 0, 1, number), (_RETURN, 0, 0, deny))),
        *(() if may_fork else _threads_only(abi, deny)),
        (_RETURN, 0, 0, _ALLOW),
    )


def _threads_only(abi: _Abi, deny: int) -> Sequence[_Instruction]:
    return (
        (_EQUALS, 0, 1, abi.clone3),
        (_RETURN, 0, 0, _ABSENT),
        (_EQUALS, 1, 0, abi.clone),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_HAS_BITS, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, deny),
    )


def _impossible(reason: str) -> TargetError:
    return TargetError(f"the kernel cannot be told to refuse processes: {reason}")
