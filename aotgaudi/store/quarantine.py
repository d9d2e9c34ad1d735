"""Quarantine: damaged files are moved to where no look-up finds them, and kept so that a person can find the cause.

::

    quarantine/<name>.<8 hex>           the file as it was found
    quarantine/<name>.<8 hex>.reason    one line of JSON: {"path": where it was, "reason": what is wrong}
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
from pathlib import Path

from aotgaudi.errors import StoreError, store_error
from aotgaudi.files import make_directories

_LOG = logging.getLogger(__name__)
_LONGEST_NAME = 200
"""The longest part of the original name that is kept. A file name may have 255 bytes."""


def quarantine(root: Path, path: Path, reason: str) -> Path | None:
    """Moves `path`, which is under `root`, to quarantine, with a note of the reason. Returns None if it is already gone.

    Otherwise returns its new path.

    Raises StoreError if it cannot be moved.
    """
    target = root / "quarantine" / f"{path.name[:_LONGEST_NAME]}.{secrets.token_hex(4)}"
    try:
        make_directories(target.parent)
        os.rename(path, target)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise store_error("quarantine", path, error) from error
    _LOG.warning("quarantined %s: %s (kept as %s)", path, reason, target)
    note = {"path": os.path.relpath(path, root), "reason": reason}
    with contextlib.suppress(OSError):  # A full disk must not keep damaged files in use.
        reason_path(target).write_text(json.dumps(note) + "\n", encoding="utf-8")
    return target


def release(root: Path, path: Path, target: Path) -> None:
    """Moves an intact file back from quarantine, unless another file has taken its place."""
    try:
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.link(target, path, follow_symlinks=False)
        os.unlink(target)
        reason_path(target).unlink(missing_ok=True)
    except OSError as error:
        raise store_error("take out of quarantine", root / target.name, error) from error


def reason_path(target: Path) -> Path:
    """Returns the path of the note that belongs to a file in quarantine."""
    return target.with_name(f"{target.name}.reason")


def try_quarantine(root: Path, path: Path, reason: str) -> None:
    """Quarantines a file as `quarantine` does, but only logs if it cannot be moved, for example in a read-only store."""
    try:
        quarantine(root, path, reason)
    except StoreError as error:
        _LOG.warning("%s is damaged (%s) and stays where it is: %s", path, reason, error)
