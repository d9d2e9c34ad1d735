"""What a process that serves from a card needs: its environment, and room on the card. Imports no torch.

The environment is set before torch is imported, because the bridge reads it then (K-01).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from aotgaudi.errors import TargetError, store_error
from aotgaudi.gaudi.environment import process_environment
from aotgaudi.machine import Memory
from aotgaudi.manifest.memory import MemoryNeed

_PREFIX = "aotgaudi-recipes-"
RESERVED_SHARE = 0.1
"""Of the card's memory, for recipes and their workspaces (vLLM for Gaudi keeps as much for graphs). Not measured by us."""


def on_card(need: MemoryNeed, card: Memory) -> MemoryNeed:
    """Returns what a server needs of a card, with what is reserved there."""
    reserved_bytes = int(card.total_bytes * RESERVED_SHARE)
    return replace(need, reserved_bytes=reserved_bytes, reserved_for="recipes and workspaces")


def prepare() -> None:
    """Sets this process's environment, with a new directory for its recipes.

    Raises TargetError if torch is imported already.
    """
    if "torch" in sys.modules:
        raise TargetError(
            "target: torch was imported before this process knew that it serves from a Gaudi, and the bridge reads its"
            " environment when torch is imported (import aotgaudi and open the bundle first)"
        )
    for name in [name for name in sys.modules if name.startswith("torch.")]:
        del sys.modules[name]  # Stand-ins for what only tracing needs; the bridge's front end traces.
    wanted = process_environment(os.environ, _new_directory() / "recipes")
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)


def _new_directory() -> Path:
    """Returns a new directory of ours alone, locked as long as this process lives. Removes those of processes that ended."""
    parent = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    try:
        for old in parent.glob(f"{_PREFIX}*"):
            if old.stat().st_uid == os.geteuid() and _locked(old):
                _remove(old)
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    except OSError as error:
        raise store_error("make a directory in", parent, error) from error
    _locked(directory)
    return directory


def _locked(directory: Path) -> bool:
    """Locks a directory until this process ends. Returns False if another process has it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    return True


def _remove(directory: Path) -> None:
    for path in directory.iterdir():
        path.chmod(0o700)
    shutil.rmtree(directory, ignore_errors=True)
