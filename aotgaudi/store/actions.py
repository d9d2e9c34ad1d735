"""Looking up results, in the store's own records first and then in the layers below, and noting their use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from aotgaudi.errors import StoreError
from aotgaudi.store.records import Keep, RecordStore, Stamp

USE_GRANULARITY_SECONDS = 6 * 3600.0
"""A use is noted when the last one is older than this: most look-ups write nothing."""


class Actions:
    """A persistent mapping from a key (64 hex digits) to a JSON object. Safe between processes and hosts.

    `lower` are roots of read-only layers, consulted in order for what `root` lacks. With `read_only`, uses
    are not noted and writing raises StoreError. `clock` gives the time of a use.
    """

    def __init__(
        self,
        root: Path,
        lower: Iterable[Path] = (),
        *,
        read_only: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.records = RecordStore(root)
        self._lower = tuple(map(RecordStore, lower))
        self._read_only = read_only
        self._clock = clock

    def get(self, key: str) -> dict[str, Any] | None:
        """Returns the result recorded for `key`, or None."""
        return self.get_many((key,)).get(key)

    def get_many(self, keys: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Returns the results of those `keys` that have one, in the order of `keys`."""
        found = ((key, self._look_up(key)) for key in keys)
        return {key: value for key, value in found if value is not None}

    def put(self, key: str, value: Mapping[str, Any], keep: Keep = lambda _: False) -> dict[str, Any]:
        """Records `value` for `key` unless `keep` accepts an earlier result; returns what is recorded then.

        Durable when it returns. Raises StoreError if it cannot be written, and ValueError if `key` is malformed or
        `value` is not a JSON object.
        """
        self._require_writable()
        return self.records.publish(key, value, keep)

    def discard(self, key: str) -> None:
        """Forgets `key`, if it is there. The layers below keep theirs. Raises StoreError."""
        self._require_writable()
        self.records.discard(key)

    def stamp(self, key: str) -> Stamp | None:
        """Returns the stamp of the file that a look-up of `key` would read, or None. Reads nothing."""
        for records in (self.records, *self._lower):
            stamp = records.stamp(key)
            if stamp is not None:
                return stamp
        return None

    def identities(self, keys: Iterable[str]) -> dict[str, list[int]] | None:
        """Returns inode and size of the file that answers each key; None where one has no record."""
        stamps = {key: self.stamp(key) for key in keys}
        found = {key: [stamp.inode, stamp.size_bytes] for key, stamp in stamps.items() if stamp is not None}
        return found if len(found) == len(stamps) else None

    def are_unchanged(self, identities: Mapping[str, object]) -> bool:
        """Whether the same files answer as when `identities` was asked; notes their use where that is due."""
        stale = []
        for key, identity in identities.items():
            stamp = self.stamp(key)
            if stamp is None or [stamp.inode, stamp.size_bytes] != identity:
                return False
            if self._is_use_due(stamp):
                stale.append(key)
        self.note_use(stale)
        return True

    def note_use(self, keys: Iterable[str]) -> None:
        """Notes that the store's own records of `keys` are used now, where that is due and allowed."""
        for key in keys:
            stamp = self.records.stamp(key)
            if stamp is not None and self._is_use_due(stamp):
                self.records.touch(key, self._clock())

    def __iter__(self) -> Iterator[str]:
        """The keys of the store's own records at this moment, in ascending order."""
        return iter(sorted(self.records.keys()))

    def _look_up(self, key: str) -> dict[str, Any] | None:
        for records in (self.records, *self._lower):
            value = records.get(key)
            if value is not None:
                return value
        return None

    def _is_use_due(self, stamp: Stamp) -> bool:
        return not self._read_only and abs(self._clock() - stamp.used) > USE_GRANULARITY_SECONDS

    def _require_writable(self) -> None:
        if self._read_only:
            raise StoreError(
                f"store at {self.records.root} is opened read-only: nothing can be recorded in it"
            )
