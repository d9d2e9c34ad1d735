"""The program that becomes the wrapped server, after it has set up what must hold before the server's first instruction.

The arguments of ``main`` are PARENT [SOCKET] -- WORDS. It makes the process end with its parent. It restores the default
signals. If there is a SOCKET, it has the kernel ask us about programs that are started (`aotgaudi.wrap.programs`). Then it
becomes WORDS. It uses the standard library only, and it is a separate program because no code of ours may run between fork
and exec in a process with threads. Source: seccomp(2).
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import socket
import struct
import sys

from aotgaudi.child import die_with_parent

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes if the command cannot be run: those of a shell."""

_NO_NEW_PRIVS, _SET_MODE_FILTER, _NEW_LISTENER, _SPEC_ALLOW = 38, 1, 8, 4
"""The last one leaves speculation as it is. Without it, Linux before 5.16 slows down a filtered process."""
_ALLOW, _ASK = 0x7FFF0000, 0x7FC00000
_LOAD, _EQUALS, _RETURN = 0x20, 0x15, 0x06
_ABIS = {"x86_64": (0xC000003E, 317, 59, 322), "aarch64": (0xC00000B7, 277, 221, 281)}
"""Machine -> its AUDIT_ARCH, and the numbers of seccomp, execve and execveat."""


def main() -> None:
    """Becomes the wrapped server, or exits with one line on standard error."""
    at = sys.argv.index("--")
    parent, *asker = sys.argv[1:at]
    words = sys.argv[at + 1 :]
    die_with_parent(int(parent), signal.SIGTERM)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec keeps what is ignored.
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for socket_descriptor in asker:
        send_listener(int(socket_descriptor))
    try:
        os.execvp(words[0], words)  # noqa: S606 - becoming what the user asked for is the point
    except FileNotFoundError:
        _fail(NOT_FOUND, f"{words[0]}: there is no such command")
    except OSError as error:
        _fail(NOT_EXECUTABLE, f"{words[0]}: cannot be run: {error.strerror}")


def _ask_about_programs() -> int:
    """Has the kernel ask about every program that this process and its descendants start. Returns the listener, or -1.

    For one thread. Sets ``no_new_privs``. The holder of the listener must answer, or no program starts.
    """
    abi = _ABIS.get(platform.machine())
    if abi is None:
        return -1
    arch, seccomp, *programs = abi
    steps = [
        (_LOAD, 0, 0, 4),
        (_EQUALS, 1, 0, arch),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, 0),
        *(step for number in programs for step in ((_EQUALS, 0, 1, number), (_RETURN, 0, 0, _ASK))),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None)
    libc.syscall.restype = ctypes.c_long
    if libc.prctl(_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))):
        return -1
    return int(
        libc.syscall(*map(ctypes.c_long, (seccomp, _SET_MODE_FILTER, _NEW_LISTENER | _SPEC_ALLOW)), program)
    )


def send_listener(descriptor: int) -> None:
    """Sets up the questions about programs and sends the listener to the socket `descriptor`, from the server's process."""
    with socket.socket(fileno=descriptor) as there:
        listener = _ask_about_programs()
        socket.send_fds(there, [b"."], [listener] if listener >= 0 else [])
        if listener >= 0:
            os.close(listener)


def _fail(exit_code: int, message: str) -> None:
    sys.stderr.write(f"aotgaudi: {message}\n")
    sys.stderr.flush()
    os._exit(exit_code)
