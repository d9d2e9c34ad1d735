"""System calls that Python's standard library lacks, through ctypes. Imports the standard library only.

Each function raises OSError with the call's name as `filename`; ENOSYS if the kernel or the C library lacks the call.
Sources: the manual pages of the calls, and Linux's headers asm/unistd_64.h, asm-generic/unistd.h, linux/audit.h,
linux/{bpf_common,fs,inotify,landlock,prctl,seccomp,stat}.h and asm-generic/mman-common.h.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
_Size = ctypes.c_size_t


def _call(name: str, *arguments: object) -> int:
    """Calls a function of the C library that returns a negative number on failure."""
    function = getattr(_LIBC, name, None)
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), name)
    return _checked(name, function(*arguments))


def _syscall(name: str, number: int, *arguments: object) -> int:
    return _checked(name, _LIBC.syscall(ctypes.c_long(number), *arguments))


def _checked(name: str, result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)
    return result


# Processes


def _prctl(name: str, option: int, value: int) -> None:
    try:
        _call("prctl", option, *map(ctypes.c_ulong, (value, 0, 0, 0)))
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"prctl({name})") from None


def set_death_signal(number: int) -> None:
    """Has the kernel send this process a signal when its parent ends."""
    _prctl("PR_SET_PDEATHSIG", 1, number)


def become_subreaper() -> None:
    """Makes this process the parent of all orphans below it."""
    _prctl("PR_SET_CHILD_SUBREAPER", 36, 1)


def set_no_new_privs() -> None:
    """Makes programs that this process starts run without further rights, for good."""
    _prctl("PR_SET_NO_NEW_PRIVS", 38, 1)


# Filters of system calls

_CALLS: Mapping[str, str] = {
    "x86_64": """
        fork 57 vfork 58 clone 56 clone3 435 execve 59 execveat 322 seccomp 317 ptrace 101 process_vm_readv 310
        process_vm_writev 311 pidfd_getfd 438 io_uring_setup 425 io_uring_enter 426 io_uring_register 427""",
    "aarch64": """
        clone 220 clone3 435 execve 221 execveat 281 seccomp 277 ptrace 117 process_vm_readv 270
        process_vm_writev 271 pidfd_getfd 438 io_uring_setup 425 io_uring_enter 426 io_uring_register 427""",
}
"""Machine -> its system calls, each with its number. x86_64 has them all, aarch64 neither ``fork`` nor ``vfork``."""
_AUDIT_ARCHS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_FIRST_FOREIGN = 0x40000000
"""Numbers from this one on belong to another ABI (x32)."""

ALLOW, ASK, DENY, ABSENT = 0x7FFF0000, 0x7FC00000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
"""What a filter may answer. ASK leaves it to the holder of the listener (SECCOMP_RET_USER_NOTIF)."""
TSYNC, SPEC_ALLOW, NEW_LISTENER = 1, 4, 8

_LOAD, _EQUALS, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
"""BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_JMP|BPF_JGE|BPF_K, BPF_JMP|BPF_JSET|BPF_K, BPF_RET|BPF_K."""
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
"""Offsets in struct seccomp_data. The last one is the low half of the 64-bit argument, since both ABIs are little-endian."""
_CLONE_THREAD = 0x00010000


def call_numbers() -> Mapping[str, int]:
    """Returns the numbers of this machine's system calls; none if the machine is not known."""
    words = _CALLS.get(platform.machine(), "").split()
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))


def install_filter(answers: Mapping[str, int], flags: int, *, foreign: int, threads_only: int = ALLOW) -> int:
    """Has the kernel answer some system calls by itself, in all programs of this process, for good. Needs `no_new_privs`.

    Args:
        answers: Call -> answer. All others are allowed.
        flags: Of seccomp(2). TSYNC: on all threads.
        foreign: The answer to calls by another ABI (i386, x32, 32-bit ARM), whose numbers mean other calls.
        threads_only: The answer to a ``clone`` that starts a process.

    Returns the listener with NEW_LISTENER, else 0, or the id of a thread that cannot take the filter.
    """
    numbers = call_numbers()
    arch = _AUDIT_ARCHS[platform.machine()]
    steps = [(_LOAD, 0, 0, _ARCH_AT), (_EQUALS, 1, 0, arch), (_RETURN, 0, 0, foreign)]
    steps += [(_LOAD, 0, 0, _NUMBER_AT), (_AT_LEAST, 0, 1, _FIRST_FOREIGN), (_RETURN, 0, 0, foreign)]
    for call, answer in answers.items():
        if call not in _CALLS["x86_64"].split():
            raise ValueError(f"no number is known of a call {call!r}")
        if call in numbers:
            steps += [(_EQUALS, 0, 1, numbers[call]), (_RETURN, 0, 0, answer)]
    if threads_only != ALLOW:
        steps += [
            (_EQUALS, 1, 0, numbers["clone"]),
            (_RETURN, 0, 0, ALLOW),
            (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        ]
        steps += [(_HAS_BITS, 1, 0, _CLONE_THREAD), (_RETURN, 0, 0, threads_only)]
    steps.append((_RETURN, 0, 0, ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))  # struct sock_fprog
    return _syscall("seccomp", numbers["seccomp"], *map(ctypes.c_ulong, (1, flags)), program)


_NOTIF_RECV, _NOTIF_SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1
_NOTIF = struct.Struct("=QIIiIQ6Q")
"""struct seccomp_notif: id, process, flags; seccomp_data: number, architecture, instruction pointer, arguments."""


class WaitingCall(NamedTuple):
    """A system call that a filter answers with ASK, and that waits for an answer."""

    call_id: int
    pid: int
    number: int
    arguments: Sequence[int]


def next_call(listener: int) -> WaitingCall:
    """Returns a call that waits. Before Linux 6.6 it blocks if there is none."""
    notification = bytearray(_NOTIF.size)
    fcntl.ioctl(listener, _NOTIF_RECV, notification)
    call_id, pid, _, number, _, _, *arguments = _NOTIF.unpack(notification)
    return WaitingCall(call_id, pid, number, arguments)


def let_go_on(listener: int, call: WaitingCall) -> None:
    """Has the kernel make a call that waits."""
    fcntl.ioctl(listener, _NOTIF_SEND, struct.pack("=QqiI", call.call_id, 0, 0, _CONTINUE))


# Landlock. The numbers are the same on every architecture.

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION, _PATH_BENEATH, _REFER = 1, 1, 1 << 13


def enter_landlock_domain() -> None:
    """Puts this thread, and all that it starts, into a Landlock domain that forbids nothing, for good.

    Its one rule allows to move files anywhere (Linux 5.19). Also sets ``no_new_privs``.
    """
    handled = struct.pack("=Q", _REFER)
    if _landlock("create_ruleset", _CREATE_RULESET, None, _Size(0), ctypes.c_uint(_GET_VERSION)) < 2:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), "landlock_create_ruleset")
    ruleset = _landlock("create_ruleset", _CREATE_RULESET, handled, _Size(len(handled)), ctypes.c_uint(0))
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", _REFER, root)
        _landlock("add_rule", _ADD_RULE, *map(ctypes.c_int, (ruleset, _PATH_BENEATH)), rule, ctypes.c_uint(0))
        set_no_new_privs()
        _landlock("restrict_self", _RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0))
    finally:
        os.close(root)
        os.close(ruleset)


def _landlock(name: str, number: int, *arguments: object) -> int:
    return _syscall(f"landlock_{name}", number, *arguments)


# Files

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_STATX_BTIME, _STATX_BYTES = 0x800, 256

IN_MODIFY, IN_MOVED_FROM, IN_MOVED_TO = 0x2, 0x40, 0x80
IN_CREATE, IN_DELETE, IN_DELETE_SELF, IN_MOVE_SELF = 0x100, 0x200, 0x400, 0x800
IN_UNMOUNT, IN_Q_OVERFLOW, IN_IGNORED, IN_ONLYDIR, IN_ISDIR = 0x2000, 0x4000, 0x8000, 0x1000000, 0x40000000
_INOTIFY_EVENT = struct.Struct("iIII")
"""struct inotify_event: wd, mask, cookie, len; the name follows."""


def exchange_names(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> None:
    """Exchanges two names in one step."""
    _call("renameat2", _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)


def birth_time(path: str) -> float:
    """Returns when a file was made, in epoch seconds. Raises OSError (ENODATA) if the file system does not keep that."""
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    _call("statx", _AT_FDCWD, os.fsencode(path), 0, _STATX_BTIME, buffer)
    if not struct.unpack_from("=I", buffer, 0)[0] & _STATX_BTIME:
        raise OSError(errno.ENODATA, os.strerror(errno.ENODATA), "statx")
    seconds, nanoseconds = struct.unpack_from("=qI", buffer, 80)
    return float(seconds + nanoseconds / 1e9)


def open_inotify() -> int:
    """Returns a new descriptor of inotify, which does not block."""
    return _call("inotify_init1", os.O_NONBLOCK | os.O_CLOEXEC)


def watch_directory(descriptor: int, directory: str | os.PathLike[str], mask: int) -> int:
    """Adds a watch to a descriptor of inotify and returns its number."""
    return _call("inotify_add_watch", descriptor, os.fsencode(directory), mask)


def inotify_events(data: bytes) -> Iterator[tuple[int, int, str]]:
    """Yields watch, mask and name of the events in what was read from inotify."""
    offset = 0
    while offset + _INOTIFY_EVENT.size <= len(data):
        watch, mask, _, length = _INOTIFY_EVENT.unpack_from(data, offset)
        offset += _INOTIFY_EVENT.size
        name = data[offset : offset + length].rstrip(b"\0")
        offset += length
        yield watch, mask, os.fsdecode(name)


def dlopen(library: str | os.PathLike[str]) -> None:
    """Loads a library, which stays. Unlike loading by ctypes, this releases the interpreter's lock. Failure is ignored."""
    function = _LIBC.dlopen
    function.argtypes, function.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    function(os.fsencode(library), os.RTLD_NOW)


# Memory

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
_MADV_POPULATE_WRITE = 23
_MALLINFO = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Mallinfo2(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33."""

    _fields_ = tuple((name, _Size) for name in _MALLINFO.split())


def populate(pages: memoryview) -> None:
    """Makes the kernel back all of `pages` with memory (Linux 5.14). Unlike `mmap.madvise`, this blocks no other thread."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    _call("madvise", ctypes.c_void_p(address), _Size(len(pages)), _MADV_POPULATE_WRITE)


def mallopt(name: int, value: int) -> bool:
    """Sets a parameter of malloc. Returns whether it was accepted."""
    return _call("mallopt", name, value) == 1


def allocated_bytes() -> int:
    """Returns the bytes that malloc has given out (glibc 2.33)."""
    function = getattr(_LIBC, "mallinfo2", None)
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), "mallinfo2")
    function.restype = _Mallinfo2
    info = function()
    return int(info.uordblks + info.hblkhd)


def malloc_trim() -> None:
    """Gives freed memory back to the kernel."""
    _call("malloc_trim", _Size(0))
