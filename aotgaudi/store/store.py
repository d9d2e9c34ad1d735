"""The builder's persistent store: objects, records, an index, roots and locks, under one root.

Layout ``aotgaudi.store/1`` (grammar and version history in docs/formats/store.md)::

    format       the line "aotgaudi.store/1"
    objects/     content-addressed, immutable                       (cas.py)
    records/     key -> result, one immutable file each: the truth  (records.py)
    roots/       what is kept whatever the size                     (roots.py)
    index/       a cache of look-ups, a small file each             (index.py)
    locks/       kernel locks; a file left behind means nothing     (locks.py)
    tmp/         files being written, and incoming/, logs/,
                 toolcache/: the builder's scratch                  (scratch.py)
    quarantine/  damaged files, and what is wrong with them         (quarantine.py)

Everything but ``format``, ``objects/``, ``records/`` and ``roots/`` may be removed while no builder runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from aotgaudi.digest import Digest, canonical_json, sha256_bytes
from aotgaudi.errors import StoreError, store_error
from aotgaudi.files import make_directories, temporary_file, write_atomic
from aotgaudi.store.access import refuse_unsafe
from aotgaudi.store.cas import ObjectStore
from aotgaudi.store.index import Index
from aotgaudi.store.locks import Locks
from aotgaudi.store.records import Actions
from aotgaudi.store.roots import Roots
from aotgaudi.store.scratch import sweep_temporary_files

STORE_FORMAT = "aotgaudi.store/1"

_OWN_NAMES = frozenset(
    [
        "format",
        "objects",
        "records",
        "roots",
        "index",
        "index.lock",
        "locks",
        "tmp",
        "quarantine",
        "actions",
        "actions.lock",
    ]
)
"""``actions`` was the index before there were records."""


class Store:
    """A store at `root`. Safe in threads and between processes; use `Store.open` to make or check one."""

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
        """Opens the store at `root`, and makes it first when `create` and it is missing or empty.

        Look-ups go to `root` and then to `lower`, in order: other stores, or sealed bundles (for their objects).
        Writes go to `root`. With `read_only`, nothing at all is written there: no probe, no lock, no time of use.
        Several processes may create one store at once.

        Raises StoreError if the store is missing, is not a store, has another format, is not writable, or, unless
        `trust_others`, if others could have written to it or to a layer (see access.py).
        """
        if create and not read_only:
            _create(root.absolute())
        layers = tuple(lower)
        for layer in layers:
            _check_layer(layer)
        _check_format(root)
        if not trust_others:
            for place in (root, *layers):
                refuse_unsafe(place)
        if not read_only:
            _check_writable(root)
        return cls(root, layers, read_only=read_only)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keeps collectors out while a build or a seal needs what the store has.

        The first user of a store that nobody else uses clears ``tmp/`` of what dead writers left. Raises StoreError.
        """
        if self.read_only:
            yield
            return
        self._sweep_when_alone()
        with self.locks.shared():
            yield

    def require_writable(self) -> None:
        """Raises StoreError when the store is opened read-only: before work is done that it could not keep."""
        if self.read_only:
            raise StoreError(
                f"store at {self.root} is read-only: nothing can be built into it"
                " (use another one, with this one below it: --store DIR --lower DIR)"
            )

    def remembers(self, keys: Sequence[str]) -> bool:
        """Whether a look-up of `keys` found everything before, and the files that answered it are still there.

        No record is read: inode and size are compared, which is as much as a look-up knows of objects, whose bytes
        are verified when they are used. Notes the use of the records.
        """
        row = None if self.index is None else self.index.get(self._look_up_name(keys))
        match row:
            case {"records": dict(records), "objects": dict(objects)} if records.keys() >= set(keys):
                return self.objects.has_all(objects) and self.actions.are_unchanged(records)
        return False

    def remember(self, keys: Sequence[str], more: Iterable[str], objects: Iterable[Digest]) -> None:
        """Lets `remembers` know that records of `keys`, `more` records (by key) and `objects` are all there.

        Notes the use of the records.
        """
        found = self.actions.identities((*keys, *more))
        if found is None:
            return  # Collected meanwhile.
        self.actions.note_use(found)
        if self.index is not None:
            row = {"records": found, "objects": {digest.sha256: digest.size_bytes for digest in objects}}
            self.index.put(self._look_up_name(keys), row)

    def describe_index(self) -> str:
        """Returns, for people, where the index is and how much it holds."""
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
            return  # No locks here: nothing is swept, and `shared` says what is wrong, if anything is.


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
        raise StoreError(f"{root} is not a store: it has no file {path.name!r}") from error
    except OSError as error:
        raise store_error("read", path, error) from error
    if found != STORE_FORMAT:
        remedy = f"this aotgaudi reads {STORE_FORMAT!r}: use another directory"
        raise StoreError(f"store at {root} has format {found!r} ({remedy})")


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
