"""Remembers what a remote has answered, so that a later build need not ask it again.

A record that the remote had is remembered until room is needed, and that it had none for ten minutes, in a `diskcache` per
remote and user in the store's ``index/``. It may be removed at any time. Nothing in it is believed more than the remote:
records are checked, and objects hashed. It costs a build nothing but time if it cannot be used: one that is damaged is
removed and begun anew, and on a network file system, which SQLite cannot use safely, there is none.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aotgaudi.digest import sha256_bytes
from aotgaudi.store.location import NETWORK_FILE_SYSTEMS, file_system
from aotgaudi.store.store import Store

if TYPE_CHECKING:
    from diskcache import Cache

MISS_SECONDS = 600.0
MOST_BYTES = 64 << 20
LARGEST_REMEMBERED_BYTES = 256 << 10
_BUSY_SECONDS = 1.0

Answers = Mapping[str, "bytes | None"]
"""Key -> the bytes of a record; None: the remote had none."""


class Memory:
    """The answers that a remote gave to users of a store. No method raises. Use it from one thread."""

    def __init__(self, folder: Path | None) -> None:
        """With None, nothing is remembered."""
        self._folder = folder
        self._cache: Cache | None = None

    @classmethod
    def of(cls, store: Store, url: str) -> Memory:
        """Returns the memory of the remote at `url` in `store`."""
        if store.read_only or file_system(store.root) in NETWORK_FILE_SYSTEMS:
            return cls(None)
        return cls(store.root / "index" / "remotes" / f"{sha256_bytes(url.encode())[:16]}-{os.geteuid()}")

    def recall(self, keys: Iterable[str]) -> Answers:
        """Returns the known answers for `keys`."""
        listed = list(keys)
        found = self._use(lambda cache: [(key, cache.get(key)) for key in listed]) or []
        return {key: text.encode() if text else None for key, text in found if isinstance(text, str)}

    def note(self, answers: Answers) -> None:
        """Remembers answers, in place of earlier ones."""

        def write(cache: Cache) -> None:
            with cache.transact():
                for key, data in answers.items():
                    if data is None:
                        cache.set(key, "", expire=MISS_SECONDS)
                    elif len(data) <= LARGEST_REMEMBERED_BYTES:
                        cache.set(key, data.decode())

        if answers:
            self._use(write)

    def forget(self, keys: Iterable[str]) -> None:
        """Drops the answers for `keys`."""
        listed = list(keys)
        if listed:
            self._use(lambda cache: [cache.delete(key) for key in listed])

    def close(self) -> None:
        """Closes the database."""
        if self._cache is not None:
            with contextlib.suppress(Exception):
                self._cache.close()
        self._cache = None

    def _use(self, action: Callable[[Cache], Any]) -> Any:
        """Returns the result of `action`. After an error of the database, removes it and tries again, once."""
        for is_last in (False, True):
            if self._folder is None:
                break
            try:
                self._cache = self._cache or _open(self._folder)
                return action(self._cache)
            except Exception as error:  # Whatever a damaged file makes SQLite, zlib or JSON say.
                self.close()
                if is_last or _is_busy(error):
                    self._folder = None
                else:
                    shutil.rmtree(self._folder, ignore_errors=True)
        return None


def _open(folder: Path) -> Cache:
    from diskcache import Cache, JSONDisk
    from diskcache.core import MODE_RAW

    class PlainDisk(JSONDisk):  # type: ignore[misc]
        """Values in the database alone. It never unpickles, opens or removes anything because a row says so."""

        def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> Any:
            if mode != MODE_RAW or filename is not None:
                raise ValueError("not a value of ours")
            return super().fetch(mode, filename, value, read)

        def remove(self, filename: str) -> None:
            """Removes nothing, since no value has a file."""

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Cache(
        str(folder),
        timeout=_BUSY_SECONDS,
        disk=PlainDisk,
        disk_min_file_size=1 << 30,
        size_limit=MOST_BYTES,
        eviction_policy="least-recently-stored",
        sqlite_mmap_size=0,  # A file that is cut short while it is mapped would kill us.
    )


def _is_busy(error: Exception) -> bool:
    from diskcache import Timeout

    return isinstance(error, Timeout) or "locked" in str(error)
