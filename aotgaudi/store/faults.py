"""How the operating system's refusals read: one line with what was being done, where, why, and a remedy."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from aotgaudi.errors import StoreError


def store_error(doing: str, path: Path, error: OSError, *, needed_bytes: int = 0) -> StoreError:
    """Returns the StoreError for `error`, met while `doing` something (an infinitive) at `path`.

    `needed_bytes` is how much was to be written, 0 where that is not known; it is named when the disk, or a quota, is full.
    """
    reason = os.strerror(error.errno) if error.errno else str(error)
    remedy = _remedy(error.errno, needed_bytes)
    return StoreError(f"cannot {doing} {path}: {reason}" + (f" ({remedy})" if remedy else ""))


def _remedy(code: int | None, needed_bytes: int) -> str:
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        needed = f"{needed_bytes} bytes are needed: " if needed_bytes else ""
        return f"{needed}free space there, or use another place"
    if code in (errno.EACCES, errno.EPERM):
        return f"make it accessible to uid {os.geteuid()}, or use another place"
    if code == errno.EROFS:
        return "the file system is read-only: remount it, or use another place"
    if code in (errno.EMFILE, errno.ENFILE):
        return "too many open files: raise `ulimit -n`"
    if code == errno.EIO:
        return "the device failed: check it before trusting what it holds"
    return ""
