"""Starts Python child processes that end with their parent and send it errors that it can read.

Every Python child of ours is started with `python_command`. ``python -m`` would put the working directory (a model's, a
bundle's) first on ``sys.path``, and so run a `tokenizers.py` that lies there.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from aotgaudi.linux import set_death_signal

_PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__init__.py")

_OUR_PACKAGE = """
from importlib import import_module, util
spec = util.spec_from_file_location("aotgaudi", {package!r})
package = sys.modules["aotgaudi"] = util.module_from_spec(spec)
spec.loader.exec_module(package)
del sys.argv[0]
try:
    import_module(sys.argv[0]).main()
except Exception as error:
    refused = import_module("aotgaudi.errors").machine_error(error)
    if refused is None:
        raise
    print(sys.argv[0] + ":", refused, file=sys.stderr)
    sys.exit(1)
"""
"""Imports our package from its own file, whatever else of that name is on the path, and runs a module's ``main()``.

What the machine refuses to the process (a thread, memory) is told in one line.

``sys.argv`` then holds the module's name and its arguments.
"""

_SAME_PATH = "import sys\nsys.path[:] = {path!r}\nimport os\nos.environ['PYTHONSAFEPATH'] = '1'"
"""`sys`, which is built in, must be imported first: until the path is set, Python 3.10 searches the working directory.

With the variable set, Python 3.11 and newer also leave that directory out of processes that this one starts.
"""


def python_command(module: str, *arguments: str, bare: bool = False) -> list[str]:
    """Returns the command that runs ``main()`` of one of our modules in a new interpreter, without the working directory.

    Args:
        module: The module's full name.
        arguments: The child's ``sys.argv[1:]``.
        bare: Use the standard library alone and leave the environment unchanged, for a process that becomes another program.
    """
    if bare:
        return [
            *(sys.executable, "-I", "-S", "-c"),
            "import sys" + _OUR_PACKAGE.format(package=_PACKAGE),
            *(module, *arguments),
        ]
    path = [entry for entry in sys.path if os.path.isabs(entry)]
    code = _SAME_PATH.format(path=path) + _OUR_PACKAGE.format(package=_PACKAGE)
    safe = ("-P",) if sys.version_info >= (3, 11) else ()
    return [sys.executable, *safe, "-c", code, module, *arguments]


def die_with_parent(parent: int, number: int) -> None:
    """Asks the kernel to send us signal `number` when our parent dies. Exits if `parent` is no longer our parent."""
    with suppress(OSError):  # A sandbox may forbid it.
        set_death_signal(number)
    if os.getppid() != parent:
        sys.exit(128 + number)


def end(process: subprocess.Popen[bytes], seconds: float = 0.0) -> None:
    """Gives a child `seconds` to end by itself, and then kills it and all processes below it. Waits until it is gone."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        import psutil

        below = []
        with suppress(psutil.Error):
            below = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for each in below:
            with suppress(psutil.Error):
                each.kill()
        process.wait()


def travels(error: BaseException) -> bool:
    """Whether an error survives pickling, so that it can be sent to another process."""
    import pickle

    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    except Exception:  # Its class may raise anything.
        return False
    return True


def spawn(module: str, *arguments: str, kind: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Runs ``main()`` of `module` in a new process, and returns the process with one end of a socket of `kind`.

    The arguments of the process are the descriptor of the other end, and `arguments`. It ignores Ctrl-C, which its parent
    handles, and writes nothing to standard output.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with theirs, _interrupts_ignored():
        process = subprocess.Popen(
            python_command(module, str(theirs.fileno()), *arguments),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    return process, ours


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Makes processes that are started inside ignore Ctrl-C from the beginning. Works on the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
