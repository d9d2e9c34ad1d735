"""The index: look-ups that found everything, remembered in SQLite through diskcache.

A row says which files answered a look-up, so that the next equal one looks whether they are still there and reads
no record (`Store.remembers`). It is for this machine and user alone: never in a bundle, never read when serving.

It is a cache: rows are made from records, and losing them only costs reading the records again. So a problem with the
index is a warning and a miss; a damaged database is moved aside to ``<directory>.corrupt-<n>`` and a new one is started.
Whatever SQLite and diskcache raise counts as damage unless it is known to be a refusal (locked, full, read-only): flipped
bits come out of them as errors of many types. A wrong answer, however, could leave something unbuilt, so every row repeats
its key beside its value (``[key, value]``, with zlib's checksum around both). A row that holds a pickle, which could run
code, is damage too, and never decoded; a row that inflates beyond `MOST_ROW_BYTES` is not read.

`Store` imports this module where it has an index: it is the only one that imports diskcache.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import stat
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import diskcache
from diskcache.core import MODE_RAW

from aotgaudi.errors import StoreError

MOST_ROWS = 16
"""How many look-ups are kept, the ones last written: one a manifest that is being worked on, and some."""

MOST_ROW_BYTES = 64 << 20
"""Of one row, as JSON: a look-up of some 300,000 records. A longer one is not remembered."""

_LOG = logging.getLogger(__name__)
_WAIT_SECONDS = 60.0
_REFUSALS = ("locked", "readonly", "is full", "unable to open", "disk I/O error", "interrupted")
_SETTINGS = {
    "timeout": _WAIT_SECONDS,
    "disk_min_file_size": 1 << 40,  # Every value stays in its row.
    "statistics": 0,
    "tag_index": 0,
    "eviction_policy": "none",
    "cull_limit": 0,
    "size_limit": 1 << 60,
    "sqlite_mmap_size": 0,  # A mapped file that another process truncates is a SIGBUS.
}

T = TypeVar("T")


class StrictJSONDisk(diskcache.JSONDisk):  # type: ignore[misc]
    """`JSONDisk` that accepts only what it writes: raw keys, and raw values without a file.

    diskcache's own writes no pickle, but unpickles a row whose mode says so (CVE-2025-69872), and reads any file that
    a row names. All of that, and what does not decode, is reported as damage (sqlite3.DatabaseError).
    """

    def get(self, key: Any, raw: Any) -> Any:
        """Decodes a key column. Raises sqlite3.DatabaseError, for a pickle too."""
        if raw != 1:
            raise sqlite3.DatabaseError("it holds a key in pickle mode, which aotgaudi never writes")
        return _decoded(key)

    def fetch(self, mode: Any, filename: Any, value: Any, read: Any) -> Any:
        """Decodes a value column. Raises sqlite3.DatabaseError, for a pickle or a file too."""
        if mode != MODE_RAW or filename is not None or read:
            raise sqlite3.DatabaseError(
                f"it holds a value in mode {mode!r:.20} (4 is a pickle, 2 and 3 are files), which aotgaudi never writes"
            )
        return _decoded(value)


class Index:
    """The rows in the directory `root`, by name. Opened at first use; safe in threads and between processes.

    No method raises: what is wrong is a warning, and a miss.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._cache: Any = None

    def get(self, name: str) -> dict[str, Any] | None:
        """Returns the row `name`; None where there is none, or the index cannot be used."""

        def look_up(cache: Any) -> dict[str, Any] | None:
            match cache.get(name):
                case None:
                    return None
                case [str(found), dict(value)] if found == name:
                    return value
            raise sqlite3.DatabaseError(f"the row of {name} is about something else")

        return self._run(look_up, None)

    def put(self, name: str, value: Mapping[str, Any]) -> None:
        """Writes the row `name`, in place of an earlier one, and drops the oldest beyond `MOST_ROWS`."""

        def write(cache: Any) -> None:
            if len(json.dumps(value)) > MOST_ROW_BYTES:
                return
            cache.delete(name)  # So that it becomes the newest.
            cache.set(name, [name, dict(value)])
            for old in list(cache)[:-MOST_ROWS]:
                cache.delete(old)

        self._run(write, None)

    def names(self) -> tuple[str, ...]:
        """The names of all rows, the one written last at the end."""
        return self._run(tuple, ())

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.names())

    def close(self) -> None:
        """Closes this thread's connection; the index opens again at the next use."""
        cache, self._cache = self._cache, None
        if cache is not None:
            cache.close()

    def _run(self, action: Callable[[Any], T], otherwise: T, *, is_fresh: bool = False) -> T:
        """Runs `action`, once more on an empty index where the one that was there is damaged."""
        try:
            return action(self._opened())
        except (OSError, StoreError, diskcache.Timeout) as error:
            _LOG.warning(
                "no use is made of the action index %s: %s", self.root, error or "another process holds it"
            )
        except Exception as error:  # Of any type: both libraries trust what they read.
            if _is_refusal(error):
                _LOG.warning("no use is made of the action index %s: %s", self.root, error)
            elif self._move_aside(error) and not is_fresh:
                return self._run(action, otherwise, is_fresh=True)
        return otherwise

    def _opened(self) -> Any:
        cache = self._cache
        if cache is None:
            _make_private(self.root)
            cache = self._cache = diskcache.Cache(str(self.root), disk=StrictJSONDisk, **_SETTINGS)
        return cache

    def _move_aside(self, error: Exception) -> bool:
        """Renames the index; returns False where that is refused."""
        with contextlib.suppress(Exception):  # It is thrown away.
            self.close()
        reason = f"{type(error).__name__}: {error}"[:200].encode("ascii", "replace").decode()
        number = 1
        while (target := self.root.with_name(f"{self.root.name}.corrupt-{number}")).exists():
            number += 1
        try:
            os.rename(self.root, target)
            _LOG.warning(
                "the action index %s is damaged (%s); moved to %s, begun anew", self.root, reason, target
            )
            return True
        except OSError as refusal:  # Another process was quicker, or may do it another time.
            _LOG.warning(
                "the action index %s is damaged (%s) and stays there: %s", self.root, reason, refusal
            )
            return False


def _decoded(column: Any) -> Any:
    inflater = zlib.decompressobj()
    try:
        text = inflater.decompress(column, MOST_ROW_BYTES)
        if not inflater.eof or inflater.unused_data:
            raise ValueError(f"it is cut off, or has more than {MOST_ROW_BYTES} bytes")
        return json.loads(text)
    except (zlib.error, ValueError, TypeError, RecursionError) as error:
        raise sqlite3.DatabaseError(f"a row does not decode: {error}") from error


def _is_refusal(error: Exception) -> bool:
    """Whether SQLite may not, for now, do what was asked; it would, with the same file, at another time."""
    return isinstance(error, sqlite3.OperationalError) and any(word in str(error) for word in _REFUSALS)


def _make_private(path: Path) -> None:
    """Makes the directory with mode 0700, or refuses one that others own or could have written to."""
    if "$" in str(path):
        raise StoreError("its path must not contain '$', which diskcache would expand")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise StoreError(f"it must be a directory of uid {os.geteuid()}, not a link or another's")
    if status.st_mode & 0o022:
        raise StoreError("others may write to it (remove it, and it is made anew)")
    path.chmod(0o700)
