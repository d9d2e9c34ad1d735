"""From the caches of a server that has ended to captured files: walked, searched for secrets, and put into the store.

Everything below the roots counts but for what is left out by a reason. What could not be restored as it is (a link that
leads out, a device) or must not be sealed (a secret) is refused by its name. Nothing that was found is parsed.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from aotgaudi.bundle.capture_receipt import (
    MAX_FILES,
    CapturedFile,
    FileKind,
    LeftOut,
    require_captured_path,
    require_distinct,
)
from aotgaudi.errors import CaptureError, store_error
from aotgaudi.machine import available_cores
from aotgaudi.store.cas import ObjectStore
from aotgaudi.wrap.capture.secrets import Secret
from aotgaudi.wrap.watch.place import Place
from aotgaudi.wrap.watch.plan import OUTSIDE

CACHE, HOME, TEMPORARY = "cache", "home", "tmp"
_VOLATILE = "what processes of one run met at: a socket or a FIFO"

_MAX_THREADS = 8
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class Rules:
    """How files are collected.

    Attributes:
        left_out: Pattern -> reason; `fnmatch` of paths relative to the place's root, so ``*`` matches ``/``, too.
        kind_of: What a file is, by its path.
        secrets: What must be in none.
        places: Name -> path whose presence in files is counted.
        foreign: Paths that must be in none: what only we see.
    """

    left_out: tuple[tuple[str, str], ...]
    kind_of: Callable[[str], FileKind]
    secrets: tuple[Secret, ...] = ()
    places: Mapping[str, str] = field(default_factory=dict)
    foreign: tuple[str, ...] = ()

    def in_place(self, place: Place) -> Rules:
        """Returns the rules for a place that we may see elsewhere than the server does."""
        return self if place.here == place.root else replace(self, foreign=(str(place.here),))


@dataclass(frozen=True)
class Collected:
    """What was found.

    Attributes:
        files: By path; their bytes are in the store.
        left_out: The patterns that something was left out by.
        places: Name of a place -> how many files hold it.
        strays: Files in the server's home: a cache that no variable moves, which is therefore not captured.
    """

    files: tuple[CapturedFile, ...]
    left_out: tuple[LeftOut, ...]
    places: Mapping[str, int]
    strays: tuple[str, ...]


def collect(
    here: Path, rules: Rules, objects: ObjectStore, tops: Sequence[str] = (CACHE, TEMPORARY, HOME)
) -> Collected:
    """Puts every file below the `tops` of `here` into the store. Nobody may write there any more.

    Raises:
        CaptureError: a file cannot be captured (a link that leads out, a device, a name, too many), holds a secret, or
            changed while it was read; names it.
        StoreError: it cannot be read, or the store cannot be written to.
    """
    found = _Found(rules.left_out)
    paths = [path for top in tops for path in _walk(here, top, found)]
    if len(paths) > MAX_FILES:
        raise CaptureError(
            f"the server left {len(paths)} files in its caches, at most {MAX_FILES} are captured"
        )
    _require_names(paths)
    needles = _Needles(rules)
    with ThreadPoolExecutor(min(_MAX_THREADS, available_cores())) as pool:
        rows = list(pool.map(lambda path: _take(here, path, rules, needles, objects), paths))
    places: Counter[str] = Counter()
    for _, holds in rows:
        places.update(holds)
    files = sorted((file for file, _ in rows), key=lambda file: file.path)
    return Collected(tuple(files), found.rows(), dict(places), tuple(found.strays))


class _Found:
    """What was left out, by the pattern that it was left out by."""

    def __init__(self, left_out: Iterable[tuple[str, str]]) -> None:
        reasons = {**dict(left_out), **OUTSIDE}
        self._patterns = [
            (pattern, reason, re.compile(fnmatch.translate(pattern))) for pattern, reason in reasons.items()
        ]
        self._used: dict[str, str] = {}
        self.strays: list[str] = []

    def leaves_out(self, path: str) -> bool:
        for pattern, reason, expression in self._patterns:
            if expression.match(path):
                self._used[pattern] = reason
                if pattern == f"{HOME}/*":
                    self.strays.append(path)
                return True
        return False

    def note(self, path: str, reason: str) -> None:
        self._used[path] = reason

    def rows(self) -> tuple[LeftOut, ...]:
        return tuple(
            LeftOut(pattern=pattern, reason=reason) for pattern, reason in sorted(self._used.items())
        )


def _walk(here: Path, top: str, found: _Found) -> Iterator[str]:
    """Yields the paths of files, relative to `here`. Raises CaptureError and StoreError."""
    for parent, directories, names in os.walk(here / top, onerror=_raise):
        directories.sort()
        links = [name for name in directories if os.path.islink(os.path.join(parent, name))]
        for name in sorted((*names, *links)):
            path = os.path.relpath(os.path.join(parent, name), here)
            if not found.leaves_out(path) and _is_file(here, path, found):
                yield path


def _is_file(here: Path, path: str, found: _Found) -> bool:
    """Whether it is captured: a regular file, or a link to one below the same root."""
    mode = (here / path).lstat().st_mode
    if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode):
        found.note(path, _VOLATILE)
        return False
    if stat.S_ISLNK(mode):
        target = Path(os.path.realpath(here / path))
        if not target.is_file() or not target.is_relative_to(os.path.realpath(here)):
            raise CaptureError(
                f"{path} is a link that leads out of the server's caches: what it leads to would not be there"
            )
    elif not stat.S_ISREG(mode):
        raise CaptureError(f"{path} is neither a file nor a directory, and cannot be captured")
    return True


def _require_names(paths: Iterable[str]) -> None:
    try:
        for path in paths:
            require_captured_path(path)
        require_distinct(paths)
    except ValueError as error:
        raise CaptureError(f"a file that the server left cannot be captured: its path {error}") from error


class _Needles:
    """What files are searched for, and what finding it means."""

    def __init__(self, rules: Rules) -> None:
        self.secrets = {
            form: secret.name for secret in rules.secrets if secret.is_searched for form in secret.forms()
        }
        self.places = {os.fsencode(text): name for name, text in rules.places.items() if text}
        self.foreign = tuple(map(os.fsencode, rules.foreign))
        self.all = (*self.secrets, *self.places, *self.foreign)
        self.longest = max(map(len, self.all), default=1)


def _take(
    here: Path, path: str, rules: Rules, needles: _Needles, objects: ObjectStore
) -> tuple[CapturedFile, frozenset[str]]:
    source = Path(os.path.realpath(here / path))
    try:
        before = source.stat()
        held = _search(source, needles) | {needle for needle in needles.all if needle in os.fsencode(path)}
        _refuse(path, held, needles)
        digest = objects.put_file(source)
        after = source.stat()
    except OSError as error:
        raise store_error("read", here / path, error) from error
    if (before.st_size, before.st_mtime_ns, before.st_ino) != (
        after.st_size,
        after.st_mtime_ns,
        after.st_ino,
    ):
        raise CaptureError(
            f"{path} changed while it was read, after the server had ended: something else writes there"
        )
    mode = "0555" if before.st_mode & 0o111 else "0444"
    file = CapturedFile(path=path, digest=digest, mode=mode, kind=rules.kind_of(path))  # type: ignore[arg-type]
    return file, frozenset(needles.places[needle] for needle in held if needle in needles.places)


def _search(path: Path, needles: _Needles) -> set[bytes]:
    """Returns which needles a file holds. Read in pieces, with as much of the last one as a needle may begin in."""
    held: set[bytes] = set()
    kept = b""
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            data = kept + chunk
            held.update(needle for needle in needles.all if needle not in held and needle in data)
            kept = data[max(0, len(data) - needles.longest + 1) :]
    return held


def _refuse(path: str, held: Iterable[bytes], needles: _Needles) -> None:
    secrets = sorted({needles.secrets[needle] for needle in held if needle in needles.secrets})
    if secrets:
        raise CaptureError(
            f"{_without(path, needles)} holds the value of {', '.join(secrets)}, a secret: whoever has the bundle could read"
            " it (build without it, or keep the server from writing it there)"
        )
    if any(needle in needles.foreign for needle in held):
        raise CaptureError(
            f"{path} holds a path that only this build has: it could not be used anywhere else"
        )


def _without(path: str, needles: _Needles) -> str:
    """The path, but for what must not be printed."""
    data = os.fsencode(path)
    for secret in needles.secrets:
        data = data.replace(secret, b"***")
    return os.fsdecode(data)


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise store_error("read", Path(error.filename or "."), error) from error
