"""Collects the caches of a server that has ended: walks them, searches them for secrets, and puts the files into the store.

Every file counts unless a pattern with a reason leaves it out. A file that could not be restored (a link that leads out of
the sandbox, a device) or must not be sealed (a secret) is refused by name. No file is parsed.

No secret of the build may be sealed, because a bundle goes to registries and to other people's pods. A secret is the value
of a variable or a flag whose name says so (commands/variables.py). Files are searched for its bytes, as they are and escaped
as in JSON. Files that hold it in another form (base64, compressed, encrypted) are not recognised. The bundle's documents are
searched as well: a launch contains the command's words, and a receipt contains what the server hashed.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aotgaudi.bundle.capture_receipt import (
    MAX_FILES,
    CapturedFile,
    FileKind,
    LeftOut,
    require_captured_path,
    require_distinct,
)
from aotgaudi.commands.variables import is_secret, is_secret_key, secret_values
from aotgaudi.errors import CaptureError, store_error
from aotgaudi.machine import in_threads
from aotgaudi.store.cas import ObjectStore
from aotgaudi.wrap.session import UNCAPTURED

MIN_SECRET_BYTES = 6
"""Shorter values occur by chance in many files."""


@dataclass(frozen=True, slots=True)
class Secret:
    """A secret value, and the `name` of the variable or flag that holds it."""

    name: str
    value: str = field(repr=False)

    @property
    def is_searched(self) -> bool:
        """Whether the value is too long to occur by chance."""
        return len(self.value.encode("utf-8", "surrogateescape")) >= MIN_SECRET_BYTES

    def forms(self) -> frozenset[bytes]:
        """Returns the forms in which a file could hold it."""
        texts = {
            self.value,
            *(json.dumps(self.value, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False)),
        }
        return frozenset(text.encode("utf-8", "surrogateescape") for text in texts)


def require_public(data: bytes, noun: str, secrets: Iterable[Secret]) -> None:
    """Raises CaptureError, naming the secrets, if a document to be sealed holds any. `noun` describes the document."""
    held = sorted(
        {one.name for one in secrets if one.is_searched and any(form in data for form in one.forms())}
    )
    if held:
        raise CaptureError(
            f"the {noun} holds the value of {', '.join(held)}, a secret that everybody with the bundle could read"
            " (keep it out of the command, and of variables that are not named like secrets)"
        )


def secrets_of(
    environ: Mapping[str, str], words: Sequence[str], public_words: Iterable[str]
) -> tuple[Secret, ...]:
    """Returns the secrets of an environment and of a command, sorted by name. `public_words` are not secret."""
    found = dict(secret_values(environ))
    for name, value in _of_words(words, frozenset(public_words)):
        found.setdefault(name, value)
    return tuple(Secret(name, value) for name, value in sorted(found.items()) if value)


def _of_words(words: Sequence[str], public: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yields the names and values of secrets in a command's words, except `public` ones."""
    flag = ""
    for word in words:
        is_flag = word.startswith("-")
        if is_flag:
            flag = word.partition("=")[0]
        if word in public:
            continue
        name, is_assigned, value = word.partition("=")
        if is_assigned and (is_flag or is_secret(name)):
            yield name, value
        elif not is_flag:
            yield flag or "a word of the command", word
        yield from ((f"{flag} {key}", text) for key, text in _of_table(value or word))


def _of_table(text: str) -> Iterator[tuple[str, str]]:
    """Yields the values in a JSON table whose keys mark them as secrets."""
    if not text.startswith(("{", "[")):
        return
    try:
        pending = [("", json.loads(text))]
    except (ValueError, RecursionError):
        return
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict):
            pending.extend(value.items())
        elif isinstance(value, list):
            pending.extend((key, item) for item in value)
        elif isinstance(value, str) and is_secret_key(key):
            yield key, value


_HOME = "home"
_TOPS = ("cache", "tmp", _HOME)
_VOLATILE = "what processes of one run met at: a socket or a FIFO"

_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class Rules:
    """How files are collected.

    Attributes:
        left_out: Pattern of paths relative to the root -> reason. As in `fnmatch`, ``*`` also matches ``/``.
        kind_of: Returns a file's kind by its path.
        secrets: Values that no file may hold.
        places: Name -> path. Files that contain the path are counted.
    """

    left_out: tuple[tuple[str, str], ...]
    kind_of: Callable[[str], FileKind]
    secrets: tuple[Secret, ...] = ()
    places: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Collected:
    """What was found.

    Attributes:
        files: The files, by path; their bytes are in the store.
        left_out: The patterns that left a file out.
        places: Name of a path -> how many files hold it.
        strays: Files in the server's home, which are not captured: caches that no variable moves.
    """

    files: tuple[CapturedFile, ...]
    left_out: tuple[LeftOut, ...]
    places: Mapping[str, int]
    strays: tuple[str, ...]


def collect(here: Path, rules: Rules, objects: ObjectStore) -> Collected:
    """Puts every file of the caches, tmp and home below `here` into the store. The server must have ended.

    Raises:
        CaptureError: A file cannot be captured (a link that leads out, a device, its name, too many files), holds a
            secret, or changed while it was read. Names the file.
        StoreError: A file cannot be read, or the store cannot be written to.
    """
    reasons = {**dict(rules.left_out), **UNCAPTURED}
    patterns = [(pattern, re.compile(fnmatch.translate(pattern))) for pattern in reasons]
    paths, strays, left_out = [], [], dict[str, str]()
    for path in (path for top in _TOPS for path in _walk(here, top)):
        fitting = next((pattern for pattern, expression in patterns if expression.match(path)), None)
        if fitting is not None:
            left_out[fitting] = reasons[fitting]
            strays += [path] if fitting == f"{_HOME}/*" else []
        elif _is_volatile(here, path):
            left_out[path] = _VOLATILE
        else:
            paths.append(path)
    require_capturable(paths)
    needles = _Needles(rules)
    rows = in_threads(lambda path: _take(here, path, rules, needles, objects), paths)
    places: Counter[str] = Counter()
    for _, holds in rows:
        places.update(holds)
    files = sorted((file for file, _ in rows), key=lambda file: file.path)
    rows_left_out = (LeftOut(pattern=pattern, reason=reason) for pattern, reason in sorted(left_out.items()))
    return Collected(tuple(files), tuple(rows_left_out), dict(places), tuple(strays))


def _walk(here: Path, top: str) -> Iterator[str]:
    """Yields the paths of files and links, relative to `here`. Raises StoreError."""
    for parent, directories, names in os.walk(here / top, onerror=_raise):
        directories.sort()
        links = [name for name in directories if os.path.islink(os.path.join(parent, name))]
        for name in sorted((*names, *links)):
            yield os.path.relpath(os.path.join(parent, name), here)


def _is_volatile(here: Path, path: str) -> bool:
    """Whether a path is that of a socket or a FIFO. Raises CaptureError for what is no file in the sandbox either."""
    mode = (here / path).lstat().st_mode
    if stat.S_ISLNK(mode):
        target = Path(os.path.realpath(here / path))
        if not target.is_file() or not target.is_relative_to(os.path.realpath(here)):
            raise CaptureError(
                f"{path} is a link that leads out of the server's caches: what it leads to would not be there"
            )
    elif not (stat.S_ISREG(mode) or stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)):
        raise CaptureError(f"{path} is neither a file nor a directory, and cannot be captured")
    return stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)


def require_capturable(paths: Sequence[str]) -> None:
    """Raises CaptureError for too many files, and for a path that no capture can hold."""
    if len(paths) > MAX_FILES:
        raise CaptureError(
            f"the server left {len(paths)} files in its caches, at most {MAX_FILES} are captured"
        )
    try:
        for path in paths:
            require_captured_path(path)
        require_distinct(paths)
    except ValueError as error:
        raise CaptureError(f"a file that the server left cannot be captured: its path {error}") from error


class _Needles:
    """The byte strings that files are searched for, and their meanings."""

    def __init__(self, rules: Rules) -> None:
        self.secrets = {
            form: secret.name for secret in rules.secrets if secret.is_searched for form in secret.forms()
        }
        self.places = {os.fsencode(text): name for name, text in rules.places.items() if text}
        self.all = (*self.secrets, *self.places)
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
    """Returns the needles that a file holds. Reads overlapping pieces, so that no needle is lost between two."""
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
            f"{_without(path, needles)} holds the value of {', '.join(secrets)}, a secret that everybody with the bundle"
            " could read (build without it, or keep the server from writing it there)"
        )


def _without(path: str, needles: _Needles) -> str:
    """Returns the path with secrets removed."""
    data = os.fsencode(path)
    for secret in needles.secrets:
        data = data.replace(secret, b"***")
    return os.fsdecode(data)


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise store_error("read", Path(error.filename or "."), error) from error
