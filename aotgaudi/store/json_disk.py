"""The serialisation of the action index: JSON in the SQLite row itself, and nothing else.

diskcache's own `JSONDisk` writes no pickle, but unpickles a row whose mode says so (CVE-2025-69872), and
reads any file that a row names. This subclass accepts only what it writes: raw keys, and raw values without a
file. Imported lazily, by action_index.py alone: it is the only module that imports diskcache.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from pathlib import Path
from typing import Any

import diskcache
from diskcache.core import MODE_RAW

from aotgaudi.errors import CorruptError

_NEVER_A_FILE_BYTES = 1 << 40
_NEVER_EVICT_BYTES = 1 << 60


class StrictJSONDisk(diskcache.JSONDisk):  # type: ignore[misc]
    """`JSONDisk` that refuses pickles and files, and reports a row that does not decode as damage."""

    def get(self, key: Any, raw: Any) -> Any:
        """Decodes a key column. Raises CorruptError (a pickle) or sqlite3.DatabaseError (damage)."""
        if raw != 1:
            raise self._refusal("a key in pickle mode")
        return _decoded(key)

    def fetch(self, mode: Any, filename: Any, value: Any, read: Any) -> Any:
        """Decodes a value column. Raises CorruptError (pickle, file) or sqlite3.DatabaseError (damage)."""
        if mode != MODE_RAW or filename is not None or read:
            raise self._refusal(f"a value in mode {mode!r} (4 is a pickle, 2 and 3 are files)")
        return _decoded(value)

    def store(self, value: Any, read: Any, key: Any = None) -> Any:
        """Encodes a value. Raises ValueError (NaN, infinity) and TypeError (not a JSON value)."""
        json.dumps(value, allow_nan=False)
        return super().store(value, read, key)

    def _refusal(self, what: str) -> CorruptError:
        return CorruptError(
            f"action index {self._directory} holds {what}, which aotgaudi never writes: somebody else wrote"
            " to it (find out who; then remove that directory, and it is filled again by the next build)"
        )


def open_cache(directory: Path, timeout_seconds: float) -> Any:
    """Opens a diskcache that never evicts, counts nothing and never reads a pickle.

    `timeout_seconds` is how long to wait for another process's transaction. Raises sqlite3.DatabaseError.
    """
    return diskcache.Cache(
        str(directory),
        timeout=timeout_seconds,
        disk=StrictJSONDisk,
        disk_min_file_size=_NEVER_A_FILE_BYTES,
        statistics=0,
        tag_index=0,
        eviction_policy="none",
        cull_limit=0,
        size_limit=_NEVER_EVICT_BYTES,
        sqlite_mmap_size=0,  # A mapped file that another process truncates is a SIGBUS.
    )


def is_timeout(error: Exception) -> bool:
    """Whether `error` says that another process held the database for too long."""
    return isinstance(error, diskcache.Timeout)


def _decoded(column: Any) -> Any:
    try:
        return json.loads(zlib.decompress(column))
    except (zlib.error, ValueError, TypeError, RecursionError) as error:
        raise sqlite3.DatabaseError(f"a row does not decode: {error}") from error
