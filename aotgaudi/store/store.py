"""The builder's persistent store: objects, the action index, and locks, under one root.

Layout ``aotgaudi.store/1`` (grammar and version history in docs/formats/store.md)::

    format       the line "aotgaudi.store/1"
    objects/     content-addressed, immutable          (cas.py)
    actions/     key -> result, owner only, SQLite     (action_index.py)
    locks/       one empty file a unit being built
    tmp/         what is being written; harmless when its writer is dead

Other names are the builder's scratch. All but ``format`` and ``objects/`` may be
removed while no builder runs.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from aotgaudi.atomicfile import write_atomic
from aotgaudi.errors import StoreError
from aotgaudi.store.action_index import ActionIndex
from aotgaudi.store.cas import ObjectStore
from aotgaudi.store.faults import store_error

STORE_FORMAT = "aotgaudi.store/1"

_LOG = logging.getLogger(__name__)
_LOCK_NAME = re.compile(r"[0-9A-Za-z_-]{1,128}")
_OWN_NAMES = {"format", "objects", "actions", "actions.lock", "locks", "tmp"}
_POLL_SECONDS = 0.05


class Store:
    """A store at `root`. Safe in threads and between processes; use `Store.open` to make or check one."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.objects = ObjectStore(self.root)
        self.actions = ActionIndex(self.root / "actions")

    @classmethod
    def open(cls, root: Path, *, create: bool = True) -> Store:
        """Opens the store at `root`, and makes it first when `create` and it is missing or empty.

        Several processes may make one store at once.

        Raises StoreError when it is missing, is not a store, is of another format, or is not writable.
        """
        store = cls(root)
        if create:
            store._create()
        store._check_format()
        store._check_writable()
        return store

    @contextlib.contextmanager
    def unit_lock(self, key: str) -> Iterator[None]:
        """Holds the lock of one unit: one builder on this machine compiles it, the others wait here.

        It is the kernel's lock (``flock``) on ``locks/<key>.lock``: it dies with its holder, and a file left
        behind means nothing. Threads exclude each other too; it is not re-entrant. After waiting, look into
        the action index again. Raises StoreError where the file system has no locks; ValueError for a key
        that is not a plain name.
        """
        if not _LOCK_NAME.fullmatch(key):
            raise ValueError(f"not a unit key: {key!r}")
        path = self.root / "locks" / f"{key}.lock"
        lock = FileLock(path, fallback_to_soft=False)
        try:
            path.parent.mkdir(exist_ok=True)
            _acquire(lock, key)
        except OSError as error:
            raise store_error("lock", path, error) from error
        try:
            yield
        finally:
            lock.release()

    def close(self) -> None:
        """Closes the action index."""
        self.actions.close()

    def _create(self) -> None:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            names = {path.name for path in self.root.iterdir() if not path.name.startswith(".format.")}
            if names <= _OWN_NAMES and "format" not in names:
                write_atomic(self.root / "format", f"{STORE_FORMAT}\n".encode())
        except (OSError, StoreError) as error:
            raise self._not_writable(error) from error

    def _check_format(self) -> None:
        path = self.root / "format"
        try:
            found = path.read_bytes()[:100].decode("utf-8", "replace").strip()
        except FileNotFoundError as error:
            raise StoreError(f"{self.root} is not a store: it has no file {path.name!r}") from error
        except OSError as error:
            raise store_error("read", path, error) from error
        if found != STORE_FORMAT:
            remedy = f"this aotgaudi reads {STORE_FORMAT!r}: use another directory"
            raise StoreError(f"store at {self.root} has format {found!r} ({remedy})")

    def _check_writable(self) -> None:
        probe = self.root / "tmp" / f"probe-{secrets.token_hex(8)}"
        try:
            probe.parent.mkdir(exist_ok=True)
            probe.touch(exist_ok=False)
            probe.unlink()
        except OSError as error:
            raise self._not_writable(error) from error

    def _not_writable(self, error: OSError | StoreError) -> StoreError:
        if isinstance(error, OSError):
            error = store_error("write to", self.root, error)
        return StoreError(f"store at {self.root} is not writable: {error}")


def _acquire(lock: FileLock, key: str) -> None:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _LOG.info("waiting for another builder to finish unit %s", key)
        lock.acquire(poll_interval=_POLL_SECONDS)
