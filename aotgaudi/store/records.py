"""Records: which action (a key) produced which result (a JSON object), in one small immutable file per result.

Records are the source of truth. A store has a result if its record and the objects that the record names exist, on this host
and on any other that shares the directory. A record is the canonical JSON (RFC 8785) of::

    {"key":    64 hex digits,
     "schema": "aotgaudi.record/1",
     "sha256": of the canonical JSON of the three other members,
     "value":  the result, a JSON object}

in ``records/<first 2 hex digits>/<key>.json``, mode 0444. Canonical JSON sorts its members, so the hashed bytes are the file
without one run of bytes at a fixed position. Checking a record therefore never serializes JSON.

Versions: 1 (first).

The first publisher of a key wins. A later result with other bytes is dropped, so that all readers agree. A file with any
fault (foreign, torn, of another key, with a wrong checksum) is a miss, never a wrong hit. A file's modification time is the
time of its last use. It only decides what is collected first when space is short.

`Actions` looks up results, first in the store's own records and then in the layers below, and notes their use.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotgaudi.digest import Digest, canonical_json, sha256_bytes
from aotgaudi.errors import StoreError, store_errors
from aotgaudi.files import Temporary, open_descriptor, place, place_first, temporary_file
from aotgaudi.store.cas import Fault, discard_damaged, look, remove

RECORD_SCHEMA = "aotgaudi.record/1"
LARGEST_RECORD_BYTES = 1 << 24

_LOG = logging.getLogger(__name__)
_KEY = re.compile(r"[0-9a-f]{64}")
_MODE = 0o444
_LARGEST_INTEGER = 2**53 - 1
_TURNS = 5
"""How often a publisher tries while others are faster, before it gives up."""

Keep = Callable[[dict[str, Any]], bool]


class RecordError(ValueError):
    """The bytes are not a record of the requested key. Says why."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Cheap facts that distinguish a file from another of the same name, and its time of last use (seconds)."""

    inode: int
    size_bytes: int
    used: float


def dump_record(key: str, value: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a record. Raises ValueError for a malformed key, or a value without canonical JSON."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"not a key (64 lower-case hex digits): {key!r:.80}")
    head, body = _head(key), b'"value":' + canonical_json(dict(value)) + b"}"
    return head + _checksum(sha256_bytes(head + body)) + body


def load_record(key: str, data: bytes) -> dict[str, Any]:
    """Returns the value in a record's bytes. Raises RecordError if they are not a record of `key`."""
    head = _head(key)
    start = len(head) + len(_checksum("0" * 64))
    if not data.startswith(head):
        raise RecordError(f"is no {RECORD_SCHEMA} of this key")
    body = data[start:]
    if data[len(head) : start] != _checksum(sha256_bytes(head + body)):
        raise RecordError("its checksum is wrong")
    try:
        value = _DECODER.decode(body[len(b'"value":') : -1].decode())
    except (ValueError, RecursionError) as error:
        raise RecordError(f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RecordError("its value is no object")
    return value


def read_record(key: str, path: Path | str) -> dict[str, Any] | None:
    """Returns the value of the record of `key` in the file at `path`; None if there is no file.

    Raises RecordError if the file is not a record of `key`, and StoreError if the system refuses access, which says nothing
    about the record.
    """
    data = look(path, lambda: _read(str(path)))
    if not isinstance(data, Fault):
        return load_record(key, data)
    if data.state == "missing":
        return None
    raise RecordError(data.reason)


def digests_in(value: Any) -> Iterator[Digest]:
    """Yields every digest (``sha256:<hex>:<size>``) among the strings of a JSON value, including the keys of objects.

    The store does not know the meaning of its callers' results, so every string in the form of a digest counts as one.
    """
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending.extend(item)
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, str) and item.startswith("sha256:"):
            with contextlib.suppress(ValueError):
                yield Digest.parse(item)


class RecordStore:
    """The records under one root. Safe in threads, between processes and between hosts, without locks."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._name = f"{root}/records"

    def path(self, key: str) -> Path:
        """Returns the path of the record of `key`. Raises ValueError for a malformed key."""
        if not _KEY.fullmatch(key):
            raise ValueError(f"not a key (64 lower-case hex digits): {key!r:.80}")
        return Path(self._file_name(key))

    def stamp(self, key: str) -> Stamp | None:
        """Returns the stamp of the file for `key`, or None if there is none. One ``lstat``."""
        try:
            status = os.lstat(self._file_name(key))
        except OSError:
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        return Stamp(status.st_ino, status.st_size, status.st_mtime)

    def get(self, key: str) -> dict[str, Any] | None:
        """Returns the result recorded for `key`; None if there is no valid record. Logs a warning about an invalid one."""
        return self._look(key)[0]

    def load(self, key: str) -> dict[str, Any] | None:
        """Returns the result as `get` does, but raises RecordError for an invalid record. See `read_record`."""
        return read_record(key, self._file_name(key))

    def publish(self, key: str, value: Mapping[str, Any], keep: Keep = lambda _: True) -> dict[str, Any]:
        """Records `value` for `key`, unless there is an earlier result that `keep` accepts. Returns the recorded result.

        The record is durable on return. Raises StoreError if it cannot be written (then nothing is left behind), and
        ValueError if the value is not JSON.
        """
        data = dump_record(key, value)
        new = load_record(key, data)
        with store_errors("write", self.path(key), needed_bytes=len(data)):
            for _ in range(_TURNS):
                earlier, is_free = self._look(key)
                if earlier is not None and (earlier == new or keep(earlier)):
                    _note_difference(key, earlier, new)
                    return earlier
                if self._write(key, data, is_free):
                    return new
        raise StoreError(f"cannot write {self.path(key)}: others keep replacing it by what is no record")

    def touch(self, key: str, now: float) -> None:
        """Notes a use of `key` at `now` (seconds). Does nothing without permission to write."""
        with contextlib.suppress(OSError):
            os.utime(self._file_name(key), (now, now), follow_symlinks=False)

    def discard(self, key: str) -> None:
        """Removes the record of `key`, if there is one. Raises StoreError."""
        remove(self.path(key))

    def keys(self) -> Iterator[str]:
        """Yields the keys in the names of files, unverified and in no order. Raises StoreError."""
        for path in Path(self._name).glob("[0-9a-f][0-9a-f]/*.json"):
            if _KEY.fullmatch(path.stem) and path.stem.startswith(path.parent.name):
                yield path.stem

    def _look(self, key: str) -> tuple[dict[str, Any] | None, bool]:
        """Returns the result, as `get` does, and whether there is no file at all."""
        try:
            value = self.load(key)
        except RecordError as error:
            _LOG.warning("record %s: %s: it counts for nothing (aotgaudi cache fsck)", self.path(key), error)
            return None, False
        return value, value is None

    def _write(self, key: str, data: bytes, is_free: bool) -> bool:
        """Writes the file: as the first one if the caller found none, else in place of the one that it rejected.

        Returns False if another writer was first; the caller must then read that writer's file.
        """
        path = self.path(key)
        with temporary_file(self.root / "tmp") as file:
            _write_verified(file, data)
            if is_free:
                return place_first(file.path, path)
            if path.is_dir() and not path.is_symlink():
                discard_damaged(path, "a directory in a record's place")
            place(file.path, path, lambda: _is(path, data))
            return True

    def _file_name(self, key: str) -> str:
        return f"{self._name}/{key[:2]}/{key}.json"


def _write_verified(file: Temporary, data: bytes) -> None:
    file.write(data)
    file.settle(_MODE)
    if _read(str(file.path)) != data:
        raise StoreError(f"what was written to {file.path} reads back differently: the device failed")


def _is(path: Path, data: bytes) -> bool:
    with contextlib.suppress(OSError):
        return _read(str(path)) == data
    return False


def _read(path: str) -> bytes:
    """Returns a regular file's bytes, at most LARGEST_RECORD_BYTES and one more. Raises OSError."""
    descriptor = open_descriptor(path)
    try:
        size_bytes = min(os.fstat(descriptor).st_size, LARGEST_RECORD_BYTES)
        return os.read(descriptor, size_bytes + 1)  # A regular file gives all at once.
    finally:
        os.close(descriptor)


def _number(text: str) -> int | float:
    """Returns the number that canonical JSON means. RFC 8785 also writes large doubles as plain digits."""
    value = int(text)
    return value if abs(value) <= _LARGEST_INTEGER else float(text)


_DECODER = json.JSONDecoder(parse_int=_number)


def _head(key: str) -> bytes:
    return f'{{"key":"{key}","schema":"{RECORD_SCHEMA}",'.encode()


def _checksum(hexdigits: str) -> bytes:
    return f'"sha256":"{hexdigits}",'.encode()


def _note_difference(key: str, earlier: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    if earlier != new:
        names = sorted(name for name in {*earlier, *new} if earlier.get(name) != new.get(name))
        _LOG.info("record %s: the first result stays; a later one differs in %s", key, ", ".join(names))


USE_GRANULARITY_SECONDS = 6 * 3600.0
"""A use is noted only if the last noted one is older than this, so that most look-ups write nothing."""


class Actions:
    """A persistent mapping from keys (64 hex digits) to JSON objects. Safe between processes and hosts.

    `lower` are roots of read-only layers, which are searched in order for keys that `root` lacks. With `read_only`, uses are
    not noted and writing raises StoreError.
    """

    def __init__(
        self,
        root: Path,
        lower: Iterable[Path] = (),
        *,
        read_only: bool = False,
    ) -> None:
        self.records = RecordStore(root)
        self._lower = tuple(map(RecordStore, lower))
        self._read_only = read_only

    def get(self, key: str) -> dict[str, Any] | None:
        """Returns the result recorded for `key`, or None."""
        return self.get_many((key,)).get(key)

    def get_many(self, keys: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Returns the results of the `keys` that have one, in the order of `keys`."""
        found = ((key, self._look_up(key)) for key in keys)
        return {key: value for key, value in found if value is not None}

    def put(self, key: str, value: Mapping[str, Any], keep: Keep = lambda _: False) -> dict[str, Any]:
        """Records `value` for `key`, unless `keep` accepts an earlier result. Returns the recorded result.

        The record is durable on return. Raises StoreError if it cannot be written, and ValueError if `key` is malformed or
        `value` is not a JSON object.
        """
        self._require_writable()
        return self.records.publish(key, value, keep)

    def discard(self, key: str) -> None:
        """Removes the store's own record of `key`, if there is one. Raises StoreError."""
        self._require_writable()
        self.records.discard(key)

    def stamp(self, key: str) -> Stamp | None:
        """Returns the stamp of the file that a look-up of `key` would read, or None. Does not read the file."""
        for records in (self.records, *self._lower):
            stamp = records.stamp(key)
            if stamp is not None:
                return stamp
        return None

    def identities(self, keys: Iterable[str]) -> dict[str, list[int]] | None:
        """Returns inode and size of the file that answers each key; None if any key has no record."""
        stamps = {key: self.stamp(key) for key in keys}
        found = {key: [stamp.inode, stamp.size_bytes] for key, stamp in stamps.items() if stamp is not None}
        return found if len(found) == len(stamps) else None

    def are_unchanged(self, identities: Mapping[str, object]) -> bool:
        """Returns whether the same files answer as when `identities` were read. Notes their use if due."""
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
        """Notes that the store's own records of `keys` are used now, if this is due and allowed."""
        for key in keys:
            stamp = self.records.stamp(key)
            if stamp is not None and self._is_use_due(stamp):
                self.records.touch(key, time.time())

    def __iter__(self) -> Iterator[str]:
        """Yields the present keys of the store's own records, in ascending order."""
        return iter(sorted(self.records.keys()))

    def _look_up(self, key: str) -> dict[str, Any] | None:
        for records in (self.records, *self._lower):
            value = records.get(key)
            if value is not None:
                return value
        return None

    def _is_use_due(self, stamp: Stamp) -> bool:
        return not self._read_only and abs(time.time() - stamp.used) > USE_GRANULARITY_SECONDS

    def _require_writable(self) -> None:
        if self._read_only:
            raise StoreError(
                f"store at {self.records.root} is opened read-only: nothing can be recorded in it"
            )
