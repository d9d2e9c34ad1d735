"""Putting a finished directory in the place of another: nobody ever sees a part of one."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from aotgaudi.store.cas import fsync_dir


def exchange_directory(building: Path, out: Path) -> None:
    """Renames the directory `building` to `out`, over a missing or empty one, or in exchange for another.

    Between the two renames of an exchange there is nothing at `out`; a reader that holds the old one open keeps
    it. When the second rename fails the old one is put back.
    Raises OSError.
    """
    retired = out.with_name(f".{out.name}.old-{os.getpid()}")
    if out.exists() and any(out.iterdir()):
        shutil.rmtree(retired, ignore_errors=True)  # Of a dead process that had our number.
        os.rename(out, retired)
    try:
        os.rename(building, out)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.rename(retired, out)
        raise
    fsync_dir(out.parent)
    shutil.rmtree(retired, ignore_errors=True)
