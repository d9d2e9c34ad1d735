"""Checks who may have written to a store.

Anybody who can write to a store decides what code runs from the bundles made with it. So a store's directory must belong to
us or to root, and must not be writable or replaceable by everybody. A group may write to it, since users who share a store
trust that group.

A volume of root's is an exception for other users: something is mounted there, and everybody may write to it. A pod's
``emptyDir`` is like that (mode 0777, with fsGroup 2777). Nobody but the pod sees it, and only root can change its mode.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from aotgaudi.errors import StoreError, store_error
from aotgaudi.store.location import is_mount_point

_CHECKED = ("", "objects", "objects/sha256", "records", "roots")


def refuse_unsafe(root: Path) -> None:
    """Raises StoreError if others than root, us and our groups could have written to the store at `root`."""
    try:
        resolved = root.resolve(strict=True)
        for path in (resolved / name for name in _CHECKED):
            if path.exists():
                _refuse_directory(root, path)
        parent = replaceable_in(root)
    except OSError as error:
        raise store_error("look at", root, error) from error
    if parent is not None:
        raise StoreError(
            f"store at {root}: everybody may replace it, for everybody may write to {parent}"
            f" (chmod o-w {parent}, or +t, or trust them: --allow-unsafe-store)"
        )


def belongs_to_root(path: Path, status: os.stat_result) -> bool:
    """Returns whether the directory is root's and we are not root. Root can put anything anywhere, so it is no threat."""
    return status.st_uid == 0 and os.geteuid() != 0


def is_volume(path: Path, status: os.stat_result) -> bool:
    """Returns whether the directory is root's, we are not root, and something is mounted there."""
    return belongs_to_root(path, status) and is_mount_point(path)


def replaceable_in(path: Path, accepted: Callable[[Path, os.stat_result], bool] = is_volume) -> Path | None:
    """Returns the nearest directory above `path` in which any user could replace it; None if there is none.

    In a sticky directory, only the owner can. Links are followed. `accepted` directories do not count. Raises OSError.
    """
    for parent in path.resolve(strict=True).parents:
        status = parent.stat()
        if (
            status.st_mode & stat.S_IWOTH
            and not status.st_mode & stat.S_ISVTX
            and not accepted(parent, status)
        ):
            return parent
    return None


def _refuse_directory(root: Path, path: Path) -> None:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise StoreError(f"store at {root}: {path} is not a directory")
    if status.st_uid not in (0, os.geteuid()):
        raise StoreError(
            f"store at {root}: {path} belongs to uid {status.st_uid}, who could have put anything there"
            f" (chown it to uid {os.geteuid()}, or trust them: --allow-unsafe-store)"
        )
    if status.st_mode & stat.S_IWOTH and not is_volume(path, status):
        raise StoreError(
            f"store at {root}: everybody may write to {path}, so anybody may have put code there"
            f" (chmod o-w {path}, or trust them: --allow-unsafe-store)"
        )
