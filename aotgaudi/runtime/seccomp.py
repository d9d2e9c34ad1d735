"""Has the kernel refuse to start processes: a seccomp filter over every thread of this process, for the rest of its life.

What the filter answers, in this order (everything else is allowed, and threads can start):

==================================================  =======  ====================================================
system call                                         answer   because
==================================================  =======  ====================================================
any, by another ABI (i386, x32, 32-bit ARM)         EPERM    its numbers mean other calls
execve, execveat, fork, vfork                       EPERM    they start a program or a process
clone3                                              ENOSYS   its flags are behind a pointer, which a filter cannot
                                                             follow; C libraries fall back to clone
clone without CLONE_THREAD                          EPERM    it starts a process
==================================================  =======  ====================================================

Sources: seccomp(2), clone(2), and Documentation/userspace-api/seccomp_filter.rst of Linux. The numbers are those of its
headers asm/unistd_64.h, asm-generic/unistd.h, linux/audit.h, linux/bpf_common.h, linux/prctl.h and linux/seccomp.h.
libseccomp would write the same filter, but slim images lack its shared library.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from aotgaudi.errors import TargetError

_LOAD, _EQUALS, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
"""BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_JMP|BPF_JGE|BPF_K, BPF_JMP|BPF_JSET|BPF_K, BPF_RET|BPF_K."""
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
"""Offsets in struct seccomp_data. Of an argument, which has 64 bits, this is the low half: both ABIs are little-endian."""
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_DENY, _ABSENT = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS

_CLONE_THREAD = 0x00010000
_PR_SET_NO_NEW_PRIVS, _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC = 38, 1, 1

_Instruction = tuple[int, int, int, int]
"""struct sock_filter: code, instructions to skip if true, if false, operand."""


@dataclass(frozen=True, kw_only=True)
class _Abi:
    """The numbers of one machine's system calls. From `first_foreign` on they are another ABI's (x32's bit 30)."""

    audit_arch: int
    first_foreign: int
    seccomp: int
    denied: tuple[int, ...]
    clone: int
    clone3: int


_ABIS = {
    "x86_64": _Abi(
        audit_arch=0xC000003E,
        first_foreign=0x40000000,
        seccomp=317,
        denied=(59, 322, 57, 58),  # execve, execveat, fork, vfork
        clone=56,
        clone3=435,
    ),
    "aarch64": _Abi(
        audit_arch=0xC00000B7,
        first_foreign=0x40000000,
        seccomp=277,
        denied=(221, 281),  # execve, execveat; the others do not exist
        clone=220,
        clone3=435,
    ),
}


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def forbid_processes() -> None:
    """Keeps every thread of this process, those that run and those to come, from starting processes and programs.

    Cannot be undone. Also sets ``no_new_privs``, which the kernel asks for. May be called on any thread.

    Raises:
        TargetError: this machine cannot: another architecture or system, a 32-bit Python, an old kernel, or a sandbox that
            forbids it. No filter is in place then.
    """
    abi = _ABIS.get(platform.machine())
    if abi is None or sys.platform != "linux" or sys.maxsize < 1 << 32:
        raise _impossible(f"no filter is known for {sys.platform} on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))) != 0:
        raise _impossible(f"prctl(PR_SET_NO_NEW_PRIVS): {os.strerror(ctypes.get_errno())}")
    encoded = b"".join(struct.pack("=HBBI", *instruction) for instruction in _filter(abi))
    program = _Program(len(encoded) // 8, encoded)
    libc.syscall.restype = ctypes.c_long
    result = libc.syscall(
        ctypes.c_long(abi.seccomp),
        ctypes.c_ulong(_SECCOMP_SET_MODE_FILTER),
        ctypes.c_ulong(_SECCOMP_FILTER_FLAG_TSYNC),
        ctypes.byref(program),
    )
    if result > 0:
        raise _impossible(f"thread {result} has a filter of its own")
    if result < 0:
        raise _impossible(f"seccomp: {os.strerror(ctypes.get_errno())}")


def _filter(abi: _Abi) -> Sequence[_Instruction]:
    """Returns the program in classic BPF. A jump skips the return after it, or does not."""
    return (
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUALS, 1, 0, abi.audit_arch),
        (_RETURN, 0, 0, _DENY),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, abi.first_foreign),
        (_RETURN, 0, 0, _DENY),
        *(step for number in abi.denied for step in ((_EQUALS, 0, 1, number), (_RETURN, 0, 0, _DENY))),
        (_EQUALS, 0, 1, abi.clone3),
        (_RETURN, 0, 0, _ABSENT),
        (_EQUALS, 1, 0, abi.clone),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_HAS_BITS, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _DENY),
    )


def _impossible(reason: str) -> TargetError:
    return TargetError(f"the kernel cannot be told to refuse processes: {reason}")
