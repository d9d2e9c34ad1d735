"""Assembles a bundle next to its destination NAME, and moves it there by one rename.

::

    .NAME.tmp-PID-HEX    a bundle that a process is assembling, or the old bundle that it has exchanged and now removes
    .NAME.old-PID-HEX    the old bundle, moved aside on a system that cannot exchange two names

A process locks (flock) what it assembles or moves aside, and the lock ends with the process. The next writer to NAME removes
the leftovers of dead processes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aotgaudi.bundle.format import INDEX_NAME, load_index
from aotgaudi.errors import ManifestError, StoreError, store_error, store_errors
from aotgaudi.files import exchange_names, fsync, fsync_dir, lock_directory, make_locked_directory

_DIRECTORY_MODE = 0o755
_NUM_THREADS = 8


def refuse_foreign(out: Path) -> None:
    """Raises StoreError unless `out` is a bundle, an empty directory or missing, since nothing else may be overwritten."""
    refusal = f"cannot seal a bundle at {out}: it is"
    if not holds_something(out, refusal):
        return
    try:
        load_index((out / INDEX_NAME).read_bytes())
    except FileNotFoundError as error:
        raise StoreError(
            f"{refusal} neither a bundle nor empty (choose another path, or empty it)"
        ) from error
    except ManifestError as error:
        remedy = "remove it, or choose another path"
        raise StoreError(f"{refusal} not a bundle that this aotgaudi can read: {error} ({remedy})") from error
    except OSError as error:
        raise store_error("look at", out, error) from error


def holds_something(out: Path, refusal: str) -> bool:
    """Returns whether `out` is a directory that is not empty. Raises StoreError, with `refusal`, if it is something else."""
    with store_errors("look at", out):
        if out.is_symlink() or (out.exists() and not out.is_dir()):
            raise StoreError(f"{refusal} not a directory (choose another path)")
        return out.exists() and any(out.iterdir())


@contextlib.contextmanager
def replacing(
    out: Path, what: str, refuse: Callable[[Path], None] = refuse_foreign, *, needed_bytes: int = 0
) -> Iterator[Path]:
    """Yields a new, locked directory next to `out`, which takes the place of `out` when the block ends without an error.

    There is a bundle at `out` at every moment, except between two renames on a system without RENAME_EXCHANGE. A reader that
    has the old directory open keeps it. An error leaves the old directory at `out`, and nothing else. Errors call it `what`.

    Raises StoreError, and what `refuse` raises of the directory `out`: at once, or if somebody has put it there meanwhile.
    """
    refuse(out)
    sweep_abandoned(out)
    with store_errors(f"write {what}", out, needed_bytes=needed_bytes):
        out.parent.mkdir(parents=True, exist_ok=True)
        building, lock = make_locked_directory(out.parent, f".{out.name}.tmp-{os.getpid()}-")
        try:
            yield building
            settle(building)
            refuse(out)
            _exchange(building, out)
            fsync_dir(out.parent)
        finally:
            shutil.rmtree(building, ignore_errors=True)
            os.close(lock)


def _exchange(building: Path, out: Path) -> None:
    try:
        os.rename(building, out)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not exchange_names(building, out):
            _exchange_in_steps(building, out)


def sweep_abandoned(out: Path) -> None:
    """Removes the leftovers of dead processes next to `out`. Restores an old bundle if its process died between two renames.

    Never fails. If something cannot be removed now, the next writer tries again.
    """
    name = re.compile(rf"\.?{re.escape(out.name)}\.(tmp|old)-([0-9]{{1,10}})(-[0-9a-f]{{16}})?")
    with contextlib.suppress(OSError):
        for path in sorted(out.parent.iterdir()):
            found = name.fullmatch(path.name)
            if found is None or path.is_symlink() or _is_running(int(found[2])):
                continue
            with lock_directory(path) as is_free:
                if is_free is not True:  # A process on any machine has it; or it cannot be told.
                    continue
                if found[1] == "old" and not out.exists():
                    os.rename(path, out)
                else:
                    shutil.rmtree(path, ignore_errors=True)


def _is_running(process_id: int) -> bool:
    """Returns whether another process has this id. Our own (1, in a container) says nothing."""
    return process_id != os.getpid() and Path("/proc", str(process_id)).exists()


def _exchange_in_steps(building: Path, out: Path) -> None:
    name, _, writer = building.name.rpartition(".tmp-")
    retired = out.with_name(f"{name}.old-{writer}")
    with lock_directory(out):
        os.rename(out, retired)
        try:
            os.rename(building, out)
        except OSError:
            os.rename(retired, out)
            raise
        shutil.rmtree(retired, ignore_errors=True)


def settle(root: Path) -> None:
    """Syncs every file, then every name. Sets the mode of directories, and removes empty ones. Raises OSError."""
    paths = [Path(parent, name) for parent, _, names in os.walk(root) for name in names]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:  # In parallel, since the device syncs several together.
        for _ in pool.map(fsync, paths):
            pass
        directories = [Path(parent) for parent, _, _ in os.walk(root, topdown=False)]
        for _ in pool.map(_settle_directory, filter(_is_in_use, directories)):
            pass


def _settle_directory(path: Path) -> None:
    os.chmod(path, _DIRECTORY_MODE)
    fsync_dir(path)


def _is_in_use(path: Path) -> bool:
    try:
        os.rmdir(path)
    except OSError:  # It is not empty.
        return True
    return False
