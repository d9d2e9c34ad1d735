"""The command line, with one module per verb. Only this package reads the environment.

Importing it takes the working directory off ``sys.path``, where an empty entry of PYTHONPATH (``/app:``) and ``python -m``
put it: a `tokenizers.py` in a model or bundle would otherwise be run. Nothing is imported before that which Python has not
imported already. Child processes get the rest of the path (`aotgaudi.child`).
"""

import os
import sys


def leave_out_of_path(folder: str | os.PathLike[str]) -> None:
    """Removes `folder` and empty entries from ``sys.path``, unless Python's packages or ours are installed there."""
    kept = {os.path.dirname(os.path.dirname(os.path.dirname(__file__))), os.path.dirname(os.__file__)}
    kept |= {entry for entry in sys.path if os.path.basename(entry) in ("site-packages", "dist-packages")}
    sys.path[:] = [entry for entry in sys.path if entry in kept or (entry and not _is_same(entry, folder))]


def _is_same(entry: str, folder: str | os.PathLike[str]) -> bool:
    try:
        return os.path.samefile(entry, folder)
    except (OSError, ValueError):
        return False


leave_out_of_path(os.curdir)
