"""Clearing ``tmp/`` of what dead writers left.

A writer holds a kernel lock on its file, so a file whose lock can be had has no writer: that works for writers on
other hosts too, and needs neither a process number nor a clock. Directories (a compiler's scratch) and files on
file systems without locks go by age, measured against the clock of the file system itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from aotgaudi.store.blobs import OPEN_FLAGS
from aotgaudi.store.writing import temporary_file

GRACE_SECONDS = 3600.0
"""Longer than any unit compiles: what is older and unlocked is nobody's."""


@dataclass(frozen=True)
class SweepReport:
    """How much was cleared."""

    num_removed: int = 0
    num_in_use: int = 0


def sweep_temporary_files(root: Path, grace_seconds: float = GRACE_SECONDS) -> SweepReport:
    """Removes what dead writers left under ``tmp/``; never fails, for what stays is swept another time."""
    removed = in_use = 0
    with contextlib.suppress(OSError):
        before = _file_system_time(root / "tmp") - grace_seconds
        for path in sorted((root / "tmp").iterdir()):
            with contextlib.suppress(OSError):
                if _remove_abandoned(path, before):
                    removed += 1
                else:
                    in_use += 1
    return SweepReport(removed, in_use)


def _file_system_time(directory: Path) -> float:
    with temporary_file(directory) as file:
        return file.path.stat().st_mtime


def _remove_abandoned(path: Path, before: float) -> bool:
    status = path.lstat()
    if stat.S_ISREG(status.st_mode):
        return _remove_unlocked(path, is_old=status.st_mtime < before)
    if status.st_mtime >= before:
        return False
    shutil.rmtree(path) if stat.S_ISDIR(status.st_mode) else path.unlink()
    return True


def _remove_unlocked(path: Path, *, is_old: bool) -> bool:
    """Removes a file while holding its lock: a writer that comes too late sees that its file has no name."""
    descriptor = os.open(path, OPEN_FLAGS)
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
