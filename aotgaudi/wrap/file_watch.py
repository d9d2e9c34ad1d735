"""Which files of a wrapped server appeared, changed or disappeared, seen from outside its processes.

There are two methods, and both count. inotify reports what happened, even if it has been undone since. A comparison with the
sealed list, which hashes every byte, finds what is there now. If the system has no inotify, or loses events, only the
comparison remains, and the report says so. Source: inotify(7).
"""

from __future__ import annotations

import errno
import fnmatch
import itertools
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from aotgaudi import linux
from aotgaudi.digest import Digest
from aotgaudi.errors import StoreError
from aotgaudi.machine import in_threads
from aotgaudi.store.cas import find_fault

PASSING_SECONDS = 1.0
"""How long a server's process may keep a file that it is about to remove again: a probe, or a name before the right one."""
MAX_FILES = 1_000_000
"""The most files that are compared. A server that makes more is not warm anyway."""

_CACHES = "cache"
"""The folder that holds the server's caches, relative to the root."""
_CHUNK_BYTES = 1 << 20
_OF_ITSELF = linux.IN_DELETE_SELF | linux.IN_MOVE_SELF | linux.IN_ONLYDIR
_GONE = linux.IN_DELETE | linux.IN_MOVED_FROM
_MASK = linux.IN_MODIFY | linux.IN_MOVED_TO | linux.IN_CREATE | _GONE | _OF_ITSELF


@dataclass(frozen=True)
class FileRules:
    """Which files may lie below a sandbox's root.

    Attributes:
        root: The root, as the server sees it.
        sealed: Path, relative to the root -> digest. Empty in a cold run, where any file may appear.
        left_out: Patterns of paths that no capture holds (locks, sockets). As in `fnmatch`, ``*`` also matches ``/``.
        agent: The agent's files, likewise. They come first on the server's ``PYTHONPATH``, so nothing may be added to them.
    """

    root: Path
    sealed: Mapping[str, Digest] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    agent: Mapping[str, Digest] = field(default_factory=dict)

    @cached_property
    def cache_tops(self) -> tuple[str, ...]:
        """The caches' folder, and the folders directly below the root that hold sealed files."""
        return tuple(dict.fromkeys((_CACHES, *(path.partition("/")[0] for path in self.sealed))))

    @cached_property
    def tops(self) -> tuple[str, ...]:
        """The folders to compare: `cache_tops`, and the agent's folder if it has sealed files."""
        return tuple(dict.fromkeys((*self.cache_tops, *(path.partition("/")[0] for path in self.agent))))

    @cached_property
    def held(self) -> Mapping[str, Digest]:
        """Every file that must be there unchanged."""
        return {**self.sealed, **self.agent}

    def holds_bytes(self, path: str) -> bool:
        """Whether a path, as the server sees it, is that of a sealed file with content. An empty one may be a lock."""
        digest = self.held.get(self.relative(path) or "")
        return digest is not None and digest.size_bytes > 0

    @property
    def has_sealed(self) -> bool:
        """Whether the files that may be there are listed."""
        return bool(self.sealed)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(fnmatch.translate, self.left_out)) or r"(?!)")

    def is_left_out(self, path: str) -> bool:
        """Whether no capture holds this path, which is relative to the root."""
        if path in self.held or path.startswith(self._of_agent):
            return False
        return self._pattern.match(path) is not None or not self.is_watched(path)

    def is_watched(self, path: str) -> bool:
        """Whether a path, relative to the root, is sealed, or lies in the caches' folder or the agent's."""
        return path in self.held or path == _CACHES or path.startswith((f"{_CACHES}/", *self._of_agent))

    @cached_property
    def _of_agent(self) -> tuple[str, ...]:
        return tuple({f"{path.rpartition('/')[0]}/" for path in self.agent})

    def relative(self, path: str) -> str | None:
        """Returns a path relative to the root; None if it is not below the root. Relative paths are returned unchanged."""
        if not path.startswith("/"):
            return path
        prefix = f"{self.root}/"
        return path[len(prefix) :] if path.startswith(prefix) else None


@dataclass(frozen=True)
class FileChanges:
    """How files changed. Paths are relative to the root, sorted.

    Attributes:
        added: Files that are not sealed.
        changed: Sealed files whose bytes differ, or differed in the meantime.
        missing: Sealed files that are gone, or were gone in the meantime.
        is_compared: Whether every byte was compared with the sealed digests.
        is_watched: Whether inotify saw everything in between.
    """

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    is_compared: bool = False
    is_watched: bool = False

    def __or__(self, other: FileChanges) -> FileChanges:
        """The union of both changes. It is compared if either was, and watched if both were."""
        return FileChanges(
            _union(self.added, other.added),
            _union(self.changed, other.changed),
            _union(self.missing, other.missing),
            self.is_compared or other.is_compared,
            self.is_watched and other.is_watched,
        )


def compare(here: Path, rules: FileRules) -> FileChanges:
    """Returns how the files below `here` differ from the sealed ones. Reads every byte.

    A link, a device or a FIFO in place of a file counts as changed, and so does a file that cannot be read.
    """
    there = set(walk(here, rules))
    sealed = sorted(there & rules.held.keys())

    def is_changed(path: str) -> bool:
        try:
            return find_fault(here / path, rules.held[path]) is not None
        except StoreError:
            return True

    are_changed = in_threads(is_changed, sealed)  # Hashing releases the interpreter's lock.
    return FileChanges(
        added=tuple(sorted(there - rules.held.keys())),
        changed=tuple(itertools.compress(sealed, are_changed)),
        missing=tuple(sorted(rules.held.keys() - there)),
        is_compared=True,
        is_watched=True,
    )


def walk(here: Path, rules: FileRules) -> Iterator[str]:
    """Yields the path of every file and link, relative to `here`, that is not left out. Links are not followed."""
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


def _union(one: Iterable[str], other: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({*one, *other}))


class Watcher:
    """inotify on every directory of `FileRules.tops`, including new ones. For one thread only. Close it after use.

    `is_complete` is False if the system has no inotify, grants too few watches, or lost events.
    """

    def __init__(self, here: Path, rules: FileRules) -> None:
        self._here, self._rules = here, rules
        self._directories: dict[int, Path] = {}
        self._added, self._gone = dict[str, float](), set[str]()
        self._changed, self._missing = set[str](), set[str]()
        self.is_complete = True
        try:
            self._descriptor = linux.open_inotify()
        except OSError:
            self._descriptor, self.is_complete = -1, False
        self._add(here, _OF_ITSELF)  # If it is moved away, so are all files in it.
        for top in rules.tops:
            if (here / top).is_dir():
                self._add_tree(here / top, is_new=False)

    def close(self) -> None:
        """Stops watching."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def read(self) -> FileChanges:
        """Returns all changes since the watcher began."""
        while self._descriptor >= 0:
            try:
                data = os.read(self._descriptor, _CHUNK_BYTES)
            except BlockingIOError:
                break
            except OSError:
                self.is_complete = False
                break
            for watch, mask, name in linux.inotify_events(data):
                self._take(watch, mask, name)
        return FileChanges(
            tuple(sorted(self._added)),
            tuple(sorted(self._changed)),
            tuple(sorted(self._missing)),
            is_watched=self.is_complete,
        )

    def passing(self, seconds: float) -> frozenset[str]:
        """Returns the added files that were removed again, as of the last `read`, and those that are not `seconds` old."""
        newest = time.monotonic() - seconds
        return frozenset(self._gone).union(path for path, at in self._added.items() if at > newest)

    def _add_tree(self, top: Path, *, is_new: bool) -> None:
        """Watches a directory and all below it. Files in a new directory may precede its watch, so they count as added."""
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
                self._add_change(Path(entry.path), linux.IN_CREATE)

    def _add(self, directory: Path, mask: int = _MASK) -> None:
        if self._descriptor < 0:
            return
        try:
            self._directories[linux.watch_directory(self._descriptor, directory, mask)] = directory
        except OSError as error:  # ENOENT: it was removed meanwhile, and its parent's watch reports that.
            self.is_complete &= error.errno == errno.ENOENT

    def _take(self, watch: int, mask: int, name: str) -> None:
        if mask & (linux.IN_Q_OVERFLOW | linux.IN_UNMOUNT):
            self.is_complete = False
            return
        directory = self._directories.get(watch)
        if directory is None or mask & linux.IN_IGNORED:
            return
        # No watch covers a top's parent or other places.
        if mask & (linux.IN_DELETE_SELF | linux.IN_MOVE_SELF):
            self._lose(directory)
            return
        if mask & linux.IN_ISDIR:
            if mask & (linux.IN_CREATE | linux.IN_MOVED_TO):
                self._add_tree(directory / name, is_new=True)
            if mask & linux.IN_MOVED_FROM:  # Its files moved with it and get no events.
                self._lose(directory / name)
            return
        if name:
            self._add_change(directory / name, mask)

    def _lose(self, directory: Path) -> None:
        prefix = "" if directory == self._here else f"{directory.relative_to(self._here)}/"
        self._missing.update(path for path in self._rules.held if path.startswith(prefix))
        self._gone.update(path for path in self._added if path.startswith(prefix))

    def _add_change(self, path: Path, mask: int) -> None:
        relative = str(path.relative_to(self._here))
        if self._rules.is_left_out(relative):
            return
        if relative not in self._rules.held:
            if not mask & _GONE:
                self._added.setdefault(relative, time.monotonic())
                self._gone.discard(relative)
            elif relative in self._added:
                self._gone.add(relative)
        elif mask & _GONE:
            self._missing.add(relative)
        else:
            self._changed.add(relative)
