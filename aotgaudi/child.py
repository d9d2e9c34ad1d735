"""What a Python process that we start runs, and what it owes its parent: to end with it, and to send errors it can read.

Every Python child of ours is started with `python_command`. ``python -m`` would put the working directory first on
``sys.path``, so that a `tokenizers.py` there, in a model's directory or in a bundle, would be run.
"""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1
_PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__init__.py")

_OUR_PACKAGE = """
from importlib import import_module, util
spec = util.spec_from_file_location("aotgaudi", {package!r})
package = sys.modules["aotgaudi"] = util.module_from_spec(spec)
spec.loader.exec_module(package)
del sys.argv[0]
import_module(sys.argv[0]).main()
"""
"""Imports our package from its own file, wherever else one of that name lies, and runs a module's ``main()``.

``sys.argv`` is then the module's name and its arguments.
"""

_SAME_PATH = "import sys\nsys.path[:] = {path!r}\nimport os\nos.environ['PYTHONSAFEPATH'] = '1'"
"""The first import must be of `sys`, which is built in: until the path is set, Python 3.10 has the working directory on it.

The variable has Python 3.11 and newer leave it out in what this process starts, too.
"""


def python_command(module: str, *arguments: str, bare: bool = False) -> list[str]:
    """Returns the words that run ``main()`` of one of our modules in a new interpreter; never code of the working directory.

    Args:
        module: Its full name.
        arguments: What its ``sys.argv[1:]`` will be.
        bare: Run it with the standard library alone, and leave its environment as it is: for what becomes another program.
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
    """Has the kernel send us a signal when our parent dies, and ends this process if `parent` is not our parent any more."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        sys.exit(128 + number)


def travels(error: BaseException) -> bool:
    """Whether an error can be sent to another process, and read there."""
    import pickle

    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    except Exception:  # Whatever its class does.
        return False
    return True
