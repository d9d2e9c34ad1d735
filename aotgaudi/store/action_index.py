"""The action index: a small persistent mapping in SQLite, through diskcache, for this machine and user alone.

It is a cache of what records say (checklist.py): never in a bundle, never read when serving, and never the only
place where something is known. Losing it costs reading the records again. A wrong answer, though, could leave
something unbuilt, so every row repeats its key beside its value (``[key, value]``, with zlib's checksum around
both), and a row that is not about the key asked for is damage.

A damaged database is moved aside to ``<directory>.corrupt-<n>`` and an empty one takes its place, with a
warning. A row that holds a pickle is no damage but an attack: it raises CorruptError, and nothing is moved.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock

from aotgaudi.errors import StoreError, store_error

_LOG = logging.getLogger(__name__)
_DATABASE = "cache.db"
_WAIT_SECONDS = 60.0

T = TypeVar("T")


class ActionIndex:
    """A persistent mapping from a key (hex digits) to a JSON object, in the directory `root`.

    Nothing is opened before the first use. Safe in threads and between processes on one machine (SQLite
    and NFS do not go together). Every method raises StoreError when the directory cannot be used, or
    others may write to it, and CorruptError when it holds a pickle.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._lock = threading.RLock()
        self._cache: Any = None
        self._generation: int | None = None

    def get(self, key: str) -> dict[str, Any] | None:
        """Returns the result recorded for `key`, or None."""
        return self.get_many((key,)).get(key)

    def get_many(self, keys: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Returns the results of those `keys` that have one, in the order of `keys`."""
        wanted = tuple(keys)

        def look_up(cache: Any) -> dict[str, dict[str, Any]]:
            rows = ((key, cache.get(key)) for key in wanted)
            return {key: _value_of(key, row) for key, row in rows if row is not None}

        return self._run(look_up)

    def put(self, key: str, value: Mapping[str, Any]) -> None:
        """Records `value` for `key`, in place of an earlier one. Durable against a crash of the process.

        Raises ValueError or TypeError when `value` is not a JSON object.
        """
        row = [key, dict(value)]
        self._run(lambda cache: cache.set(key, row))

    def discard(self, key: str) -> None:
        """Forgets `key`, if it is there."""
        self._run(lambda cache: cache.delete(key))

    def __iter__(self) -> Iterator[str]:
        """The keys at this moment, in the order in which they were first put."""
        return iter(self._run(lambda cache: tuple(map(_checked_key, cache))))

    def clear(self) -> None:
        """Forgets everything."""
        self._run(lambda cache: cache.clear())

    def close(self) -> None:
        """Closes this thread's connection; the index opens again at the next use."""
        with self._lock:
            if self._cache is not None:
                self._cache.close()
            self._cache = None

    def _run(self, action: Callable[[Any], T]) -> T:
        """Runs `action` on the open cache; when the database is damaged, once more on an empty one."""
        try:
            return self._attempt(action)
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise self._unusable(error) from error
            self._move_aside(error)
        try:
            return self._attempt(action)
        except sqlite3.DatabaseError as error:
            raise self._unusable(error) from error

    def _attempt(self, action: Callable[[Any], T]) -> T:
        from aotgaudi.store.json_disk import is_timeout

        try:
            return action(self._open())
        except OSError as error:
            raise store_error("use the action index", self.root, error) from error
        except Exception as error:
            if is_timeout(error):
                raise self._unusable("another process holds it") from error
            raise

    def _open(self) -> Any:
        from aotgaudi.store.json_disk import open_cache

        with self._lock:
            if self._cache is None:
                _make_private(self.root)
                self._generation = _inode(self.root / _DATABASE)
                self._cache = open_cache(self.root, _WAIT_SECONDS)
                self._generation = self._generation or _inode(self.root / _DATABASE)
            return self._cache

    def _move_aside(self, error: sqlite3.DatabaseError) -> None:
        """Retires the damaged database, unless another process has put a new one in its place already."""
        with self._lock, FileLock(f"{self.root}.lock", fallback_to_soft=False):
            self.close()
            if _inode(self.root / _DATABASE) != self._generation:
                return
            retired = _unused_name(self.root)
            try:
                os.rename(self.root, retired)
            except OSError as refusal:
                raise store_error("move aside the damaged action index", self.root, refusal) from refusal
            _LOG.warning(
                "action index %s is damaged (%s); moved to %s, begun anew", self.root, error, retired
            )

    def _unusable(self, reason: object) -> StoreError:
        return StoreError(
            f"cannot use the action index {self.root}: {reason} (is the disk full or read-only?)"
        )


def _value_of(key: str, row: Any) -> dict[str, Any]:
    match row:
        case [str(found), dict(value)] if found == key:
            return value
    raise sqlite3.DatabaseError(f"the row of {key} is about something else")


def _checked_key(key: Any) -> str:
    if not isinstance(key, str):
        raise sqlite3.DatabaseError("a key is not a string")
    return key


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Tells damage ("malformed", foreign tables) from refusals (locked, full, read-only)."""
    if isinstance(error, sqlite3.OperationalError):
        return str(error).startswith("no such") or "has no column" in str(error)
    return type(error) is sqlite3.DatabaseError


def _make_private(path: Path) -> None:
    """Makes the directory with mode 0700, or refuses one that others own or could have written to."""
    if "$" in str(path):
        raise StoreError(f"action index {path}: the path must not contain '$', which diskcache would expand")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise StoreError(
            f"action index {path}: must be a directory of uid {os.geteuid()}, not a link or another's"
        )
    if status.st_mode & 0o022:
        raise StoreError(f"action index {path}: others may write to it (remove it, and it is made anew)")
    path.chmod(0o700)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _unused_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.name}.corrupt-{number}")).exists():
        number += 1
    return candidate
