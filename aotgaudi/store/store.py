"""The builder's persistent store: objects, records, an index, roots and locks, under one root.

Layout ``aotgaudi.store/1`` (grammar and version history in docs/formats/store.md)::

    format       the line "aotgaudi.store/1"
    objects/     content-addressed, immutable                       (cas.py)
    records/     key -> result, one immutable file each: the truth  (records.py)
    roots/       what is kept, whatever the size                    (`Roots`)
    index/       a cache of look-ups, a small file each             (`Index`)
    locks/       kernel locks; a leftover file means nothing        (`Locks`)
    tmp/         files being written; and logs/ and toolcache/:
                 the builder's scratch                              (scratch.py)

Everything except ``format``, ``objects/``, ``records/`` and ``roots/`` may be removed while no builder runs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_serializer

from aotgaudi.digest import Digest, canonical_json, sha256_bytes
from aotgaudi.document import DigestField, Document, Sha256, load_document
from aotgaudi.errors import AotGaudiError, CorruptError, ManifestError, StoreError, store_error, store_errors
from aotgaudi.files import make_directories, read_regular, temporary_file, write_atomic
from aotgaudi.store.cas import ObjectStore, remove
from aotgaudi.store.location import refuse_unsafe
from aotgaudi.store.records import Actions
from aotgaudi.store.scratch import sweep_temporary_files

ROOT_SCHEMA: Literal["aotgaudi.root/1"] = "aotgaudi.root/1"

_NAME = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z._-]{0,127}")


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"not a root's name (letters, digits, '.', '_', '-'): {name!r:.150}")
    return name


class Root(Document):
    """The records (by key) and objects that a collector must keep, however large the store is.

    ``roots/<name>.json`` is the canonical JSON (RFC 8785) of::

        {"keys":    [keys of records that are kept, with every object that they name],
         "name":    the root's name,
         "objects": [digests of objects that are kept],
         "schema":  "aotgaudi.root/1"}

    Both lists are ascending, without repetitions. Versions: 1 (first). A root lists everything that it protects, so that
    this does not depend on any other file. A root that cannot be read stops the collector, since nothing may be removed on a
    guess.

    Raises ValueError for a malformed name or key.
    """

    schema_: Literal["aotgaudi.root/1"] = Field(default=ROOT_SCHEMA, alias="schema")
    name: Annotated[str, AfterValidator(_checked_name)]
    keys: frozenset[Sha256] = frozenset()
    objects: frozenset[DigestField] = frozenset()

    @field_serializer("keys", "objects")
    def _ascending(self, values: frozenset[object]) -> list[str]:
        return sorted(map(str, values))


def load_root(name: str, data: bytes) -> Root:
    """Parses the bytes of the root `name`. Raises ManifestError."""
    root = load_document(data, Root, f"root {name}")
    if root.name != name:
        raise ManifestError(f"root {name}: is the root {root.name}")
    return root


class Roots:
    """The roots of the store at `root`."""

    def __init__(self, root: Path) -> None:
        self._directory = root / "roots"

    def put(self, root: Root) -> None:
        """Writes `root`, in place of an earlier one of the same name. Writes nothing if it has not changed.

        Raises StoreError.
        """
        path, data = self._path(root.name), root.dumps()
        with store_errors("write", path, needed_bytes=len(data)):
            if path.is_file() and path.read_bytes() == data:
                return
            make_directories(path.parent)
        write_atomic(path, data)

    def get(self, name: str) -> Root:
        """Returns a root. Raises StoreError if there is none of this name, CorruptError if it cannot be read."""
        path = self._path(name)
        try:
            return load_root(name, path.read_bytes())
        except FileNotFoundError as error:
            raise StoreError(f"there is no root {name!r} in {self._directory}") from error
        except OSError as error:
            raise store_error("read", path, error) from error
        except ManifestError as error:
            raise CorruptError(
                f"{error} (until {path} is removed or kept anew, nothing is collected)"
            ) from error

    def remove(self, name: str) -> None:
        """Removes a root, so that what only it kept may be collected. Raises StoreError if there is none."""
        if not remove(self._path(name)):
            raise StoreError(f"there is no root {name!r} in {self._directory}")

    def names(self) -> tuple[str, ...]:
        """Returns the names of all roots, ascending."""
        return tuple(
            sorted(path.stem for path in self._directory.glob("*.json") if _NAME.fullmatch(path.stem))
        )

    def __iter__(self) -> Iterator[Root]:
        """Yields every root, ordered by name. Raises CorruptError."""
        return map(self.get, self.names())

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise StoreError(f"not a root's name (letters, digits, '.', '_', '-'): {name!r:.150}")
        return self._directory / f"{name}.json"


_LOG = logging.getLogger(__name__)
_LOCK_NAME = re.compile(r"[0-9A-Za-z_-]{1,128}")
_NO_LOCKS_ERRORS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Locks:
    """The kernel locks (``flock``) of the store at `root`. They end with their holder. A leftover file means nothing.

    ::

        locks/<key>.lock    held by the builder that works on a unit
        locks/store         shared by builds and seals; held exclusively by a garbage collector

    The locks also exclude threads from each other, and are not re-entrant. On a network file system, the kernel passes locks
    on to the server (Linux does this over NFS). Without locks, two builders may compile the same unit. This is waste but not
    an error, because objects have equal bytes and the first record stays. Collecting requires the lock, and is refused.
    """

    def __init__(self, root: Path) -> None:
        self._directory = root / "locks"

    @contextlib.contextmanager
    def try_unit(self, key: str) -> Iterator[bool]:
        """Holds the lock of a unit, so that only one builder compiles it. Yields False at once if the lock is taken.

        Builders do not wait. A builder whose unit is taken works on another one, and looks this one up later. Without locks,
        every builder gets the lock, with a warning. A unit may then be compiled twice, and the first record stays.

        Raises StoreError if the lock's file cannot be created, and ValueError for a key that is not a plain name.
        """
        if not _LOCK_NAME.fullmatch(key):
            raise ValueError(f"not a unit key: {key!r}")
        with self._lock(f"{key}.lock", fcntl.LOCK_EX | fcntl.LOCK_NB) as state:
            yield state is not False

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Keeps collectors out, after waiting for one that is running. Has no effect without locks."""
        with self._lock("store", fcntl.LOCK_SH) as _:
            yield

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[bool]:
        """Keeps all others out, or yields False at once if the lock is held.

        Raises StoreError if the file system has no locks.
        """
        with self._lock("store", fcntl.LOCK_EX | fcntl.LOCK_NB) as state:
            if state is None:
                raise StoreError(
                    f"{self._directory}: the file system has no locks (collect on the host that has)"
                )
            yield state

    def forget_units(self) -> None:
        """Removes the files of unit locks, held or not. Call it only under `exclusive`."""
        for path in self._directory.glob("*.lock"):
            with contextlib.suppress(OSError):
                path.unlink()

    @contextlib.contextmanager
    def _lock(self, name: str, operation: int) -> Iterator[bool | None]:
        """Yields whether we hold the lock; None without locks. Raises StoreError."""
        path = self._directory / name
        with store_errors("lock", path):
            make_directories(path.parent)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o664)
        try:
            yield _flock(descriptor, operation, path)
        finally:
            os.close(descriptor)


def _flock(descriptor: int, operation: int, path: Path) -> bool | None:
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS_ERRORS:
            raise store_error("lock", path, error) from error
        _LOG.warning("%s: the file system has no locks; units may be compiled twice, and nothing worse", path)
        return None
    return True


MOST_ROWS = 16
"""How many look-ups are kept, the most recently written: one for each manifest in use, and some more."""

MOST_ROW_BYTES = 64 << 20
"""The largest row, for a look-up of some 300,000 records. A longer look-up is not remembered."""


class Index:
    """Look-ups that found everything, each remembered in a small JSON file. Safe in threads and between processes.

    A row says which files answered a look-up. So the next equal look-up only checks that these files still exist, and reads
    no record (`Store.remembers`). ``index/<name>.json`` is::

        {"name": name, "sha256": of the value's JSON with sorted keys, "value": value}

    The index is a cache made from records. Losing a row only costs reading the records again. A file with any fault is a
    miss, and the next look-up replaces it. A wrong row could leave something unbuilt, so each row has its name and a
    checksum. Anyone who can write to the index can write to the store, and so decides what it holds anyway. Sealing and
    serving never read the index.

    No method raises. A row that cannot be read is a miss, and one that cannot be written gives a warning.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def get(self, name: str) -> dict[str, Any] | None:
        """Returns the row `name`; None if there is none or it is unusable."""
        try:
            data = read_regular(self._path(name), MOST_ROW_BYTES)
            match json.loads(data):
                case {"name": str(found), "sha256": digest, "value": dict(value)} if found == name:
                    return value if digest == sha256_bytes(_dumps(value)) else None
        except (OSError, AotGaudiError, ValueError, RecursionError):
            pass
        return None

    def put(self, name: str, value: Mapping[str, Any]) -> None:
        """Writes the row `name`, in place of an earlier one, and drops the oldest rows beyond `MOST_ROWS`."""
        data = _dumps({"name": name, "sha256": sha256_bytes(_dumps(value)), "value": dict(value)})
        if len(data) > MOST_ROW_BYTES:
            return
        try:
            make_directories(self.root)
            write_atomic(self._path(name), data)
        except (OSError, AotGaudiError) as error:
            _LOG.warning("a look-up is not remembered: %s", error)
            return
        others = [path for path in self._rows() if path.stem != name]
        for path in others[MOST_ROWS - 1 :]:
            with contextlib.suppress(OSError):
                path.unlink()

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self._rows())

    def _path(self, name: str) -> Path:
        return self.root / f"{name}.json"

    def _rows(self) -> list[Path]:
        """Returns the files of the rows, the most recently written first."""
        rows = []
        for path in self.root.glob("[!.]*.json"):
            with contextlib.suppress(OSError):
                rows.append((os.lstat(path).st_mtime_ns, path))
        return [path for _, path in sorted(rows, reverse=True)]


def _dumps(value: Mapping[str, Any]) -> bytes:
    """Returns JSON that, unlike canonical JSON, can hold inode numbers of 64 bits."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


STORE_FORMAT = "aotgaudi.store/1"

_OWN_NAMES = frozenset({"format", "objects", "records", "roots", "index", "locks", "tmp"})


class Store:
    """A store at `root`. Safe in threads and between processes. Use `Store.open` to create or check one."""

    def __init__(
        self,
        root: Path,
        lower: Iterable[Path] = (),
        *,
        read_only: bool = False,
    ) -> None:
        """`lower` are read-only layers. A store that is opened read-only has no index."""
        self.root = root.absolute()
        self.lower = tuple(path.absolute() for path in lower)
        self.read_only = read_only
        self.objects = ObjectStore(self.root, self.lower, heals=not read_only)
        self.actions = Actions(self.root, self.lower, read_only=read_only)
        self.roots = Roots(self.root)
        self.locks = Locks(self.root)
        self.index = None if read_only else Index(self.root / "index")

    @classmethod
    def open(
        cls,
        root: Path,
        *,
        create: bool = True,
        lower: Iterable[Path] = (),
        read_only: bool = False,
        trust_others: bool = False,
    ) -> Store:
        """Opens the store at `root`. With `create`, creates it first if it is missing or empty.

        Look-ups go to `root` and then to `lower` in order, which are other stores or sealed bundles (for their objects).
        Writes go to `root`. With `read_only`, nothing at all is written there: no probe, no lock, no time of use. Several
        processes may create a store at the same time.

        Raises StoreError if the store is missing, is not a store, has another format, or is not writable. Unless
        `trust_others`, also raises it if others could have written to the store or to a layer (see location.py).
        """
        if create and not read_only:
            _create(root.absolute())
        layers = _checked_layers(lower, trust_others=trust_others)
        _check_format(root)
        if not trust_others:
            refuse_unsafe(root)
        if not read_only:
            _check_writable(root)
        return cls(root, layers, read_only=read_only)

    @classmethod
    def open_absent(cls, root: Path, lower: Iterable[Path] = (), *, trust_others: bool = False) -> Store:
        """Returns the empty store that a store which is not there is to a reader, with its lower layers. Makes nothing.

        Raises StoreError for a layer, like `open`.
        """
        if os.path.lexists(root) and not root.is_dir():
            _check_format(root)
        return cls(root, _checked_layers(lower, trust_others=trust_others), read_only=True)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keeps collectors out while a build or a seal needs the contents of the store.

        If nobody else uses the store, first removes the leftovers of dead writers from ``tmp/``. Raises StoreError.
        """
        if self.read_only:
            yield
            return
        self._sweep_when_alone()
        with self.locks.shared():
            yield

    def require_writable(self) -> None:
        """Raises StoreError if the store is opened read-only. Call it before work whose results it could not keep."""
        if self.read_only:
            raise StoreError(
                f"store at {self.root} is read-only: nothing can be built into it"
                " (use another one, with this one below it: --store DIR --lower DIR)"
            )

    def remembers(self, keys: Sequence[str]) -> bool:
        """Returns whether an earlier look-up of `keys` found everything, and the files that answered it still exist.

        Reads no record, but compares inodes and sizes. A look-up checks no more of objects, since their bytes are verified
        when they are used. Notes the use of the records.
        """
        row = None if self.index is None else self.index.get(self._look_up_name(keys))
        match row:
            case {"records": dict(records), "objects": dict(objects)} if records.keys() >= set(keys):
                return self.objects.has_all(objects) and self.actions.are_unchanged(records)
        return False

    def remember(self, keys: Sequence[str], more: Iterable[str], objects: Iterable[Digest]) -> None:
        """Stores for `remembers` that the records of `keys`, `more` records (by key) and `objects` all exist.

        Notes the use of the records.
        """
        found = self.actions.identities((*keys, *more))
        if found is None:
            return  # Something was collected meanwhile.
        self.actions.note_use(found)
        if self.index is not None:
            row = {"records": found, "objects": {digest.sha256: digest.size_bytes for digest in objects}}
            self.index.put(self._look_up_name(keys), row)

    def describe_index(self) -> str:
        """Describes in words where the index is and how much it holds."""
        if self.index is None:
            return "none: records are read directly"
        if not self.index.root.exists():
            return f"{self.index.root}: not begun"
        return f"{self.index.root}: {len(self.index)} look-ups"

    def _look_up_name(self, keys: Sequence[str]) -> str:
        layers = [str(path) for path in (self.root, *self.lower)]
        return sha256_bytes(canonical_json(["aotgaudi.checklist/1", layers]) + "\n".join(keys).encode())

    def _sweep_when_alone(self) -> None:
        try:
            with self.locks.exclusive() as is_alone:
                if is_alone:
                    sweep_temporary_files(self.root)
        except StoreError:
            return  # Without locks, nothing is swept. `shared` reports other errors.


def _create(root: Path) -> None:
    try:
        make_directories(root)
        names = {path.name for path in root.iterdir() if not path.name.startswith(".format.")}
        if names <= _OWN_NAMES and "format" not in names:
            write_atomic(root / "format", f"{STORE_FORMAT}\n".encode())
    except (OSError, StoreError) as error:
        raise _not_writable(root, error) from error


def _check_format(root: Path) -> None:
    path = root / "format"
    try:
        found = path.read_bytes()[:100].decode("utf-8", "replace").strip()
    except (FileNotFoundError, NotADirectoryError) as error:
        found = f"it has no file {path.name!r}" if root.exists() else "it does not exist"
        raise StoreError(f"{root} is not a store: {found}") from error
    except OSError as error:
        raise store_error("read", path, error) from error
    if found != STORE_FORMAT:
        remedy = f"this aotgaudi reads {STORE_FORMAT!r}: use another directory"
        raise StoreError(f"store at {root} has format {found!r} ({remedy})")


def _checked_layers(lower: Iterable[Path], *, trust_others: bool) -> tuple[Path, ...]:
    layers = tuple(lower)
    for layer in layers:
        _check_layer(layer)
        if not trust_others:
            refuse_unsafe(layer)
    return layers


def _check_layer(layer: Path) -> None:
    if (layer / "format").exists():
        _check_format(layer)
    elif not (layer / "objects").is_dir():
        raise StoreError(f"lower layer {layer}: neither a store nor a bundle is there")


def _check_writable(root: Path) -> None:
    try:
        with temporary_file(root / "tmp"):
            pass
    except OSError as error:
        raise _not_writable(root, error) from error


def _not_writable(root: Path, error: OSError | StoreError) -> StoreError:
    if isinstance(error, OSError):
        error = store_error("write to", root, error)
    return StoreError(f"store at {root} is not writable: {error}")
