"""The second witness: which files appeared, changed or went below a guest's roots, seen from outside.

Two ways, and both count. inotify tells what happened, even where it was undone since; a comparison with the sealed list,
every byte hashed, tells what is. Where the system gives no inotify, or loses some of it, the comparison alone remains,
and the report says so. Source: inotify(7).
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import fnmatch
import itertools
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from aotgaudi.digest import Digest, sha256_pieces
from aotgaudi.files import open_descriptor
from aotgaudi.machine import available_cores

MAX_FILES = 1_000_000
"""How many files below the roots are looked at; a guest that makes more is not warm anyway."""

_CHUNK_BYTES = 1 << 20
_MAX_THREADS = 8
_MODIFY, _MOVED_FROM, _MOVED_TO = 0x2, 0x40, 0x80
_CREATE, _DELETE, _DELETE_SELF, _MOVE_SELF = 0x100, 0x200, 0x400, 0x800
_UNMOUNT, _Q_OVERFLOW, _IGNORED, _ONLYDIR, _ISDIR = 0x2000, 0x4000, 0x8000, 0x1000000, 0x40000000
_MASK = _MODIFY | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _DELETE_SELF | _MOVE_SELF | _ONLYDIR
_HEADER = struct.Struct("iIII")
"""struct inotify_event: wd, mask, cookie, len; the name follows."""


@dataclass(frozen=True)
class FileRules:
    """What may lie below a place's root.

    Attributes:
        root: The place's root, as the guest sees it.
        watched: Folders below it, relative, that hold the guest's caches: ``cache``, and what else was captured.
        sealed: Path, relative to the root -> digest. Empty in a cold run: then everything may appear.
        left_out: Patterns of paths that are no part of a capture (locks, sockets); `fnmatch`, so ``*`` matches ``/``, too.
    """

    root: Path
    watched: tuple[str, ...] = ("cache",)
    sealed: Mapping[str, Digest] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @cached_property
    def tops(self) -> tuple[str, ...]:
        """The folders that are looked at: those that are watched, and those below the root that hold what is sealed."""
        return tuple(dict.fromkeys((*self.watched, *(path.partition("/")[0] for path in self.sealed))))

    @property
    def has_sealed(self) -> bool:
        """Whether there is a list of what may be there."""
        return bool(self.sealed)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(fnmatch.translate, self.left_out)) or r"(?!)")

    def is_left_out(self, path: str) -> bool:
        """Whether a path, relative to the root, is no part of a capture, or not below the folders that are."""
        if path in self.sealed:
            return False
        return self._pattern.match(path) is not None or not self.is_watched(path)

    def is_watched(self, path: str) -> bool:
        """Whether a path, relative to the root, is below a folder that holds the guest's caches, or is sealed."""
        return path in self.sealed or any(path == top or path.startswith(f"{top}/") for top in self.watched)

    def relative(self, path: str) -> str | None:
        """Returns a path relative to the root (relative ones are so already); None for one that is not below it."""
        if not path.startswith("/"):
            return path
        prefix = f"{self.root}/"
        return path[len(prefix) :] if path.startswith(prefix) else None


@dataclass(frozen=True)
class FileChanges:
    """What was seen of files. Paths are relative to the place's root, sorted.

    Attributes:
        added: Files that are not sealed.
        changed: Sealed files that have, or had meanwhile, other bytes.
        missing: Sealed files that are not there, or were away meanwhile.
        is_compared: Whether every byte was compared with what is sealed.
        is_watched: Whether inotify saw everything in between.
    """

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    is_compared: bool = False
    is_watched: bool = False

    @property
    def is_clean(self) -> bool:
        """Whether nothing was seen that should not be."""
        return not (self.added or self.changed or self.missing)

    def __or__(self, other: FileChanges) -> FileChanges:
        """What either saw; compared where either did, watched where both were."""
        return FileChanges(
            _union(self.added, other.added),
            _union(self.changed, other.changed),
            _union(self.missing, other.missing),
            self.is_compared or other.is_compared,
            self.is_watched and other.is_watched,
        )


def compare(here: Path, rules: FileRules) -> FileChanges:
    """Returns how the files below `here`, where we see the place's root, differ from what is sealed; reads every byte.

    A link, a device or a FIFO in the place of a file is another file. What cannot be read has changed.
    """
    there = set(walk(here, rules))
    sealed = sorted(there & rules.sealed.keys())

    def is_changed(path: str) -> bool:
        return not _has_bytes(here / path, rules.sealed[path])

    with ThreadPoolExecutor(
        min(_MAX_THREADS, available_cores())
    ) as pool:  # Hashing releases the interpreter's lock.
        are_changed = list(pool.map(is_changed, sealed))
    return FileChanges(
        added=tuple(sorted(there - rules.sealed.keys())),
        changed=tuple(itertools.compress(sealed, are_changed)),
        missing=tuple(sorted(rules.sealed.keys() - there)),
        is_compared=True,
        is_watched=True,
    )


def walk(here: Path, rules: FileRules) -> Iterator[str]:
    """Yields every path, relative to `here`, that is no directory and is not left out; links are not followed."""
    count = 0
    for top in rules.tops:
        for parent, directories, files in os.walk(here / top):
            links = [name for name in directories if Path(parent, name).is_symlink()]
            for name in (*files, *links):
                path = os.path.relpath(os.path.join(parent, name), here)
                if rules.is_left_out(path):
                    continue
                count += 1
                if count > MAX_FILES:
                    return
                yield path


def _has_bytes(path: Path, digest: Digest) -> bool:
    try:
        descriptor = open_descriptor(path)
    except OSError:
        return False
    try:
        if os.fstat(descriptor).st_size != digest.size_bytes:
            return False
        return sha256_pieces(iter(lambda: os.read(descriptor, _CHUNK_BYTES), b"")) == digest.sha256
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _union(one: Iterable[str], other: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({*one, *other}))


class Watcher:
    """inotify on every directory below the watched folders, new ones included. One thread only; close it.

    `is_complete` is False where the system gave no inotify, not enough of it, or lost events: a comparison must do.
    """

    def __init__(self, here: Path, rules: FileRules) -> None:
        self._here, self._rules = here, rules
        self._directories: dict[int, Path] = {}
        self._added, self._changed, self._missing = set[str](), set[str](), set[str]()
        self.is_complete = True
        self._library = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._open()
        for top in rules.tops:
            if (here / top).is_dir():
                self._add_tree(here / top, is_new=False)

    def close(self) -> None:
        """Stops watching."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    @property
    def descriptor(self) -> int:
        """What becomes readable when something has happened; negative where the system gave none."""
        return self._descriptor

    def read(self) -> FileChanges:
        """Returns everything that was seen since the watcher began."""
        while self._descriptor >= 0:
            try:
                data = os.read(self._descriptor, _CHUNK_BYTES)
            except BlockingIOError:
                break
            except OSError:
                self.is_complete = False
                break
            for watch, mask, name in _parse(data):
                self._take(watch, mask, name)
        return FileChanges(
            tuple(sorted(self._added)),
            tuple(sorted(self._changed)),
            tuple(sorted(self._missing)),
            is_watched=self.is_complete,
        )

    def _open(self) -> int:
        if not hasattr(self._library, "inotify_init1"):
            self.is_complete = False
            return -1
        descriptor = int(self._library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self.is_complete = descriptor >= 0
        return descriptor

    def _add_tree(self, top: Path, *, is_new: bool) -> None:
        """Watches a directory and those below it; what lies in a new one before it is watched has been added."""
        self._add(top)
        try:
            entries = list(os.scandir(top))
        except OSError as error:
            self.is_complete &= error.errno == errno.ENOENT
            return
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                self._add_tree(Path(entry.path), is_new=is_new)
            elif is_new:
                self._add_sight(Path(entry.path), _CREATE)

    def _add(self, directory: Path) -> None:
        if self._descriptor < 0:
            return
        watch = self._library.inotify_add_watch(self._descriptor, os.fsencode(directory), _MASK)
        if watch < 0:
            self.is_complete &= ctypes.get_errno() == errno.ENOENT  # Removed meanwhile: its parent tells.
            return
        self._directories[watch] = directory

    def _take(self, watch: int, mask: int, name: str) -> None:
        if mask & (_Q_OVERFLOW | _UNMOUNT):
            self.is_complete = False
            return
        directory = self._directories.get(watch)
        if directory is None or mask & _IGNORED:
            return
        if mask & _ISDIR:
            if mask & (_CREATE | _MOVED_TO):
                self._add_tree(directory / name, is_new=True)
            if mask & _MOVED_FROM:  # What lay in it went with it, unseen.
                self._lose(directory / name)
            return
        if name:
            self._add_sight(directory / name, mask)

    def _lose(self, directory: Path) -> None:
        prefix = f"{directory.relative_to(self._here)}/"
        self._missing.update(path for path in self._rules.sealed if path.startswith(prefix))

    def _add_sight(self, path: Path, mask: int) -> None:
        relative = str(path.relative_to(self._here))
        if self._rules.is_left_out(relative):
            return
        if relative not in self._rules.sealed:
            if not mask & (_DELETE | _MOVED_FROM):
                self._added.add(relative)
        elif mask & (_DELETE | _MOVED_FROM):
            self._missing.add(relative)
        else:
            self._changed.add(relative)


def _parse(data: bytes) -> Iterator[tuple[int, int, str]]:
    offset = 0
    while offset + _HEADER.size <= len(data):
        watch, mask, _, length = _HEADER.unpack_from(data, offset)
        offset += _HEADER.size
        name = data[offset : offset + length].rstrip(b"\0")
        offset += length
        yield watch, mask, os.fsdecode(name)


NO_FILES: Mapping[str, Digest] = MappingProxyType({})
"""What is sealed in a cold run: nothing."""
