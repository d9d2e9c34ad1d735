"""Scratch: files of builders that are neither objects nor records, and how they are removed.

::

    tmp/            files being written, and directories (``unit-*``) that a compiler works in
    logs/           the output of compilers, a file per unit
    toolcache/      files that a compiler can use again, a directory per toolchain: toolcache/toolchains/<name>

A writer holds a kernel lock on its file in ``tmp/``, so a file whose lock is free has no writer. This also works for writers
on other hosts, and needs neither process ids nor a clock. A compiler's directory is locked in the same way. Other
directories, and everything on file systems without locks, are removed by age, according to the clock of the file system
itself. The other folders are not needed while no builder runs. Their contents are removed when space is short (collect.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aotgaudi.digest import sha256_bytes
from aotgaudi.errors import StoreError
from aotgaudi.files import (
    lock_directory,
    make_directories,
    make_locked_directory,
    open_descriptor,
    own_directory,
    temporary_file,
)
from aotgaudi.store.cas import remove

SCRATCH_PREFIX = "unit-"
"""Prefix of directories that their users lock (`locked_directory`)."""

GRACE_SECONDS = 3600.0
"""Longer than any unit takes to compile, so older files without a lock are abandoned."""

_PLAIN = re.compile(r"[A-Za-z0-9._/+@-]*", re.ASCII)
_LONGEST_PLAIN = 1024
"""Leaves room for the names that a compiler makes below (PATH_MAX has 4,096 bytes)."""
_SHORT_PLACES = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - a directory of ours alone is made there

_ITEMS = ("logs/*", "toolcache/*/*")


@dataclass(frozen=True)
class Usage:
    """The number and size of files of one kind."""

    num_files: int = 0
    size_bytes: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.num_files + other.num_files, self.size_bytes + other.size_bytes)


@dataclass(frozen=True, slots=True)
class ScratchItem:
    """A log or a tool cache. `used` is when it was last written or used (seconds)."""

    path: Path
    size_bytes: int
    used: float


def list_scratch(root: Path) -> tuple[ScratchItem, ...]:
    """Returns the items that may be removed when space is short, in no order. Skips files that disappear meanwhile."""
    items = []
    for pattern in _ITEMS:
        for path in root.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                items.append(ScratchItem(path, usage_of(path).size_bytes, path.lstat().st_mtime))
    return tuple(items)


def sweep_temporary_files(root: Path) -> int:
    """Removes the leftovers of dead writers in ``tmp/``, and returns how many. The next sweep tries again what stays."""
    num_removed = 0
    with contextlib.suppress(OSError):
        with temporary_file(root / "tmp") as file:
            before = file.path.stat().st_mtime - GRACE_SECONDS
        for path in sorted((root / "tmp").iterdir()):
            with contextlib.suppress(OSError, StoreError):
                num_removed += _remove_abandoned(path, before)
    return num_removed


@contextlib.contextmanager
def locked_directory(root: Path) -> Iterator[Path]:
    """Yields a private directory in ``tmp/``, which is removed at the end, or by a sweep if we die. Its path is plain.

    Raises OSError, and StoreError like `plain_path`.
    """
    path, lock = make_locked_directory(plain_path(root) / "tmp", SCRATCH_PREFIX)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def plain_path(path: Path) -> Path:
    """Returns a path to the directory `path` that may stand in a compiler's command line: `path` itself, or a link to it.

    Inductor splits commands at spaces, and what reads the paths that it prints knows no quotes. The link lies in a directory
    of ours, and is the same in every process and every build, because precompiled headers are found by commands that contain
    it. Raises StoreError if no link can be made.
    """
    path = path.absolute()
    if _is_plain(str(path)):
        return path
    for place in dict.fromkeys((tempfile.gettempdir(), *_SHORT_PLACES)):
        folder = Path(place) / f"aotgaudi-paths-{os.geteuid()}"
        with contextlib.suppress(OSError):
            if _is_plain(place) and own_directory(folder):
                return _linked(folder / sha256_bytes(os.fsencode(path))[:16], path)
    raise StoreError(
        f"{path}: compilers take letters, digits and ._/+@- in a path of at most {_LONGEST_PLAIN} bytes, and no link to it"
        f" can be made in {', '.join(_SHORT_PLACES)} (use another place, or make one of these writable)"
    )


def _is_plain(text: str) -> bool:
    return len(text) <= _LONGEST_PLAIN and _PLAIN.fullmatch(text) is not None


def _linked(link: Path, path: Path) -> Path:
    """Makes the link if it is missing, whoever else makes it now, and what it leads to. Raises OSError."""
    make_directories(path)  # Torch would take a link that leads nowhere for a file.
    with contextlib.suppress(FileExistsError):
        link.symlink_to(path, target_is_directory=True)
    return link


def usage_of(path: Path) -> Usage:
    """Returns the number and size of the files in a tree. Files that disappear meanwhile are not counted."""
    is_tree = path.is_dir() and not path.is_symlink()
    files = (
        (Path(parent, name) for parent, _, names in os.walk(path) for name in names) if is_tree else (path,)
    )
    usage = Usage()
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            usage += Usage(1, file.lstat().st_size)
    return usage


def _remove_abandoned(path: Path, before: float) -> bool:
    status = path.lstat()
    if stat.S_ISREG(status.st_mode):
        return _remove_unlocked(path, is_old=status.st_mtime < before)
    if status.st_mtime < before:
        return remove(path)
    if not (stat.S_ISDIR(status.st_mode) and path.name.startswith(SCRATCH_PREFIX)):
        return False
    with lock_directory(path) as is_free:  # Until it is gone: its maker may be about to lock it.
        return is_free is True and remove(path)


def _remove_unlocked(path: Path, *, is_old: bool) -> bool:
    """Removes a file while it holds the file's lock. A writer that locks it too late notices that its file has no name.

    Returns False if a writer holds the lock. Without locks, removes only files that are old.
    """
    descriptor = open_descriptor(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except BlockingIOError:
        return False
    except OSError:
        if not is_old:
            return False
        path.unlink()
    finally:
        os.close(descriptor)
    return True
