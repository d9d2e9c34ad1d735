"""What a process that serves from a card needs: its environment, and room on the card. Imports no torch.

The environment is set before torch is imported, because the bridge reads it then (K-01).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from aotgaudi.errors import TargetError, store_errors
from aotgaudi.files import lock_directory, make_locked_directory
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
    with store_errors("make a directory in", parent):
        for old in parent.glob(f"{_PREFIX}*"):
            with contextlib.suppress(FileNotFoundError):  # Another process removes it, too.
                _remove_abandoned(old)
        return make_locked_directory(parent, _PREFIX)[0]  # Its descriptor stays open.


def _remove_abandoned(directory: Path) -> None:
    if directory.stat().st_uid != os.geteuid():
        return
    with lock_directory(directory) as is_free:
        if is_free:
            for path in directory.iterdir():
                path.chmod(0o700)
            shutil.rmtree(directory, ignore_errors=True)
