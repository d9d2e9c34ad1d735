"""Waiting until the bridge has stored what a process compiled: it stores in a thread, and a kill loses what is queued.

Every process that compiles does this before it ends (K-35). Source: ``job_thread.h`` and ``utils/debug/__init__.py`` of
the bridge; the function is private there.
"""

from __future__ import annotations

import time
from pathlib import Path

from aotgaudi.errors import store_error

_SETTLED_SECONDS = 1.0
_LONGEST_SECONDS = 10.0


def flush_recipes(debug: object, directory: Path) -> bool:
    """Waits until every recipe is stored in `directory`. Returns whether the bridge could be told to.

    Where it cannot, this waits until nothing has changed there for a second, ten seconds at most; what was stored is
    then known only after the process has ended in an orderly way.

    Args:
        debug: The module ``habana_frameworks.torch.utils.debug``, imported by the caller.
        directory: Of the recipes, which may be missing.

    Raises:
        StoreError: the directory cannot be listed.
    """
    flush = getattr(debug, "_flush_disk_cache", None)
    if flush is not None:
        flush()
        return True
    deadline, before = time.monotonic() + _LONGEST_SECONDS, None
    while before != (now := _sizes(directory)) and time.monotonic() < deadline:
        before = now
        time.sleep(_SETTLED_SECONDS)
    return False


def _sizes(directory: Path) -> dict[str, int]:
    try:
        return {path.name: path.stat().st_size for path in directory.iterdir()}
    except FileNotFoundError:
        return {}  # Not made yet, or a temporary file went while we looked.
    except OSError as error:
        raise store_error("list", directory, error) from error
