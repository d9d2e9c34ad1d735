"""Checks that only root and the current user own and can write to the files of a bundle or a model.

Each file is checked through its descriptor, after it is opened and before it is read. Then no other user can change its
bytes after we have verified them.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from aotgaudi.errors import UntrustedError, store_error
from aotgaudi.store.access import replaceable_in

_ALLOW = "allow it with --allow-unsafe-permissions"


@dataclass(frozen=True, slots=True)
class OwnerRule:
    """Accepts files that belong to `uid` or root and that nobody else may write to, except the group with `trusts_group`."""

    uid: int
    trusts_group: bool = False

    def check(self, path: Path, status: os.stat_result) -> None:
        """Raises UntrustedError, with `path` and the remedy, unless the rule accepts `status`."""
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid not in (0, self.uid):
            who = f"root, or to uid {self.uid}" if self.uid else "root"
            raise UntrustedError(
                f"{path} belongs to uid {status.st_uid}, who can change it; it must belong to {who}"
                f" (chown -R {self.uid} {path}, or {_ALLOW})"
            )
        if mode & (stat.S_IWOTH if self.trusts_group else stat.S_IWGRP | stat.S_IWOTH):
            who = "everybody" if mode & stat.S_IWOTH else "its group"
            raise UntrustedError(
                f"{path} can be written to by {who} (mode {mode:04o}) (chmod -R go-w {path}, or {_ALLOW})"
            )
        if mode & stat.S_ISVTX:
            raise UntrustedError(
                f"{path} is sticky (mode {mode:04o}), as shared directories are (chmod -R -t {path}, or {_ALLOW})"
            )

    def check_parents(self, path: Path) -> None:
        """Raises UntrustedError if anybody may replace `path` by something else, and OSError."""
        parent = replaceable_in(path)
        if parent is not None:
            raise UntrustedError(
                f"everybody may replace {path}, for everybody may write to {parent}"
                f" (chmod o-w {parent}, or +t, or {_ALLOW})"
            )


def check_directories(root: Path, on_the_way: Iterable[Path], rule: OwnerRule) -> None:
    """Checks `root`, the directories above it, and those `on_the_way` to its objects. Links are not followed.

    Files are checked when they are opened, and `verify_bundle` refuses all others. Raises UntrustedError, and StoreError if
    the system does not let us look.
    """
    try:
        rule.check(root, root.stat())
        rule.check_parents(root)
        for path in on_the_way:
            _check_name(path, rule)
    except OSError as error:
        raise store_error("look at", root, error) from error


def _check_name(path: Path, rule: OwnerRule) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # Verifying reports missing objects.
        status = path.lstat()
        if not stat.S_ISLNK(status.st_mode):
            rule.check(path, status)
