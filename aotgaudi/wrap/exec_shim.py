"""The program that becomes the wrapped server, after it has set up what must hold before the server's first instruction.

The arguments of ``main`` are PARENT SOCKET -- WORDS. It makes the process end with its parent. It restores the default
signals. It has the kernel ask us about programs that are started, by the SOCKET (`aotgaudi.wrap.programs`). Then it becomes
WORDS. It uses the standard library only, and it is a separate program because no code of ours may run between fork
and exec in a process with threads.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from aotgaudi import linux
from aotgaudi.child import die_with_parent

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes if the command cannot be run: those of a shell."""


def main() -> None:
    """Becomes the wrapped server, or exits with one line on standard error."""
    parent, asker, _, *words = sys.argv[1:]
    die_with_parent(int(parent), signal.SIGTERM)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec keeps what is ignored.
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    send_listener(int(asker))
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
    if not linux.call_numbers():
        return -1
    try:
        linux.set_no_new_privs()
        # SPEC_ALLOW: before 5.16, Linux slows down filtered processes otherwise.
        flags = linux.NEW_LISTENER | linux.SPEC_ALLOW
        answers = dict.fromkeys(("execve", "execveat"), linux.ASK)
        return linux.install_filter(answers, flags, foreign=linux.ALLOW)
    except OSError:
        return -1


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
