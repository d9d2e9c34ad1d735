"""A remote as the cache behind a store: looks records up, fetches their objects, and uploads results, in threads.

A build asks for many keys at once and goes on meanwhile. What the remote has is hashed and recorded in the store, so whoever
looks there next finds it. Anything else is a miss: no record, one that is damaged or of another key, an object that is
missing or has other bytes. A remote that fails three times in a row, or does not answer in time, is lost: it is not asked
again, and the build goes on without it. Uploads may be lost alone, if the remote is full or read-only.

Each kind of trouble is one warning. Only the local store's own errors are raised.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from aotgaudi.digest import Digest, sha256_bytes
from aotgaudi.errors import CompileError, CorruptError, MissingObjectError, RemoteError, SpecError, first_line
from aotgaudi.share.remote import NoAnswerError, Remote, is_read_only, without_password
from aotgaudi.store.location import NETWORK_FILE_SYSTEMS, file_system
from aotgaudi.store.records import RecordError, digests_in, dump_record, load_record
from aotgaudi.store.store import Store

if TYPE_CHECKING:
    from diskcache import Cache


_NUM_THREADS = 32
"""For records, and as many for objects. They wait for a network."""

_MOST_FAILURES = 3
_LOG = logging.getLogger(__name__)

T = TypeVar("T")
RowT = TypeVar("RowT", bound="Row")


class Row(Protocol):
    """What a record holds."""

    def digests(self) -> Iterator[Digest]:
        """Yields the objects that it names."""
        ...

    def model_dump(self, *, mode: str) -> Any:
        """Returns the row as a JSON value."""
        ...


Parse = Callable[[Any], RowT]
"""Makes a row of a record's value, or raises ValueError."""
Record = Callable[[Store, str, RowT], object]
"""Records a row at a key of a store."""


@dataclass(frozen=True)
class Sharing:
    """The remote at `url`, and whether results are uploaded to it."""

    url: str
    push: bool = False

    def __post_init__(self) -> None:
        """Raises SpecError for a remote that cannot be written to."""
        if self.push and is_read_only(self.url):
            shown = without_password(self.url)
            raise SpecError(
                "--push", f"{shown:.200} can only be read", "s3://, gs:// or a directory, or no --push"
            )

    def open(self, store: Store, warn: Callable[[str], None] = _LOG.warning) -> RemoteCache:
        """Returns the remote as the cache behind `store`. Sends nothing. Raises SpecError."""
        return RemoteCache(
            Remote(self.url), store, RememberedAnswers.of(store, self.url), push=self.push, warn=warn
        )


@dataclass(frozen=True)
class Traffic:
    """What a remote gave and got: records, the bytes of their objects, and the seconds during which something was awaited.

    `num_here`: how many of the records the store had.
    """

    remote: str
    num_here: int
    num_fetched: int
    fetched_bytes: int
    fetch_seconds: float
    num_uploaded: int
    uploaded_bytes: int


class RemoteCache:
    """`remote` behind `store`. With `push`, results are uploaded. `warn` is called with one line, from any thread.

    A context manager, which waits for the uploads, unless its body was stopped, or failed otherwise than by a CompileError.
    Use it from one thread.
    """

    def __init__(
        self,
        remote: Remote,
        store: Store,
        memory: RememberedAnswers | None = None,
        *,
        push: bool = False,
        warn: Callable[[str], None] = _LOG.warning,
    ) -> None:
        self._is_pushing = push
        self._remote, self._store = remote, store
        self._memory = memory or RememberedAnswers(None)
        self._trouble = _Trouble(remote.label, warn)
        self._reading = _Health(self._trouble, "going on without it")
        self._writing = _Health(self._trouble, "nothing more is uploaded")
        self._records, self._objects = _Threads(_NUM_THREADS), _Threads(_NUM_THREADS)
        self._asked: dict[str, Future[bool]] = {}
        self._uploads: dict[str, Future[None]] = {}
        self._started: dict[tuple[Callable[[Digest], None], Digest], Future[None]] = {}
        self._refused: set[str | Digest] = set()
        self._answers: dict[str, bytes | None] = {}
        self._stale: set[str] = set()
        self._came: set[str] = set()
        self._fetched, self._uploaded = _Count(), _Count()
        self._lock = threading.Lock()
        self._is_reached = False

    def __enter__(self) -> RemoteCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None or issubclass(kind, CompileError):
                self.finish()
        finally:
            self._reading.is_lost = self._writing.is_lost = True
            self._records.close()
            self._objects.close()
            self._memory.close()

    def look_up(self, key: str, parse: Parse[RowT], record: Record[RowT]) -> Future[bool]:
        """Fetches the record of `key` and its objects into the store. The result says whether they are there now.

        A key is asked for once. The future raises StoreError if the store cannot be written.
        """
        return self._look_up(key, parse, record, self._recall([key]))

    def look_up_all(self, keys: Iterable[str], parse: Parse[RowT], record: Record[RowT]) -> int:
        """Fetches the records of all `keys`, at once. Returns how many the store has now. Raises StoreError."""
        listed = list(dict.fromkeys(keys))
        known = self._recall(listed)
        if not self._is_reached and any(key not in known for key in listed):
            self._is_reached = True  # The first request opens the connection for all threads, or finds none.
            listed.sort(key=known.__contains__)
            self._look_up(listed[0], parse, record, known).result()
        found = [self._look_up(key, parse, record, known) for key in listed]
        return sum(future.result() for future in found)

    def fetch(self, digest: Digest) -> None:
        """Fetches one object into the store. Raises RemoteError, MissingObjectError, CorruptError, StoreError."""
        self._once(self._fetch, [digest])

    def upload(self, key: str, row: Row) -> Future[None]:
        """Uploads the objects of `row` that the remote lacks, and then its record, unless there is a sound one.

        Does nothing without `push`. The future raises RemoteError, which need not be looked at: there is a warning, too.
        """
        if key not in self._uploads:
            self._uploads[key] = (
                self._records.submit(self._send, key, row) if self._is_pushing else _done(None)
            )
        return self._uploads[key]

    def finish(self, num_here: int = 0) -> Traffic:
        """Waits for all uploads, and returns what was done so far; the store had `num_here` records. Raises StoreError."""
        for asked in self._asked.values():
            asked.result()
        for upload in self._uploads.values():
            try:
                upload.result()
            except RemoteError:
                pass  # There is a warning already, or there will be one.
            except (CorruptError, MissingObjectError) as error:
                self._trouble.tell("ours", f"a result is not uploaded: {error}")
        self._memory.note(self._answers)
        self._memory.forget(self._stale)
        self._answers, self._stale = {}, set()
        self._reading.tell()
        self._writing.tell()
        return Traffic(
            self._remote.label,
            num_here,
            self._fetched.num_records,
            self._fetched.size_bytes,
            self._fetched.seconds,
            self._uploaded.num_records,
            self._uploaded.size_bytes,
        )

    def _recall(self, keys: Iterable[str]) -> Mapping[str, bytes | None]:
        return self._memory.recall(key for key in keys if key not in self._asked)

    def _look_up(
        self, key: str, parse: Parse[RowT], record: Record[RowT], known: Mapping[str, bytes | None]
    ) -> Future[bool]:
        if key not in self._asked:
            if self._store.read_only or (key in known and known[key] is None):
                self._asked[key] = _done(False)
            else:
                self._asked[key] = self._records.submit(self._bring, key, parse, record, known.get(key))
        return self._asked[key]

    def _bring(self, key: str, parse: Parse[RowT], record: Record[RowT], known: bytes | None) -> bool:
        try:
            with self._fetched.timed():
                data = known or self._reading.call(lambda: self._remote.get_record(key))
                if data is None:
                    self._answers[key] = None
                    return False
                row = parse(load_record(key, data))
                self._once(self._fetch, row.digests())
        except (ValueError, CorruptError, MissingObjectError) as error:  # A RecordError is a ValueError.
            self._refused.add(key)
            self._stale.add(key)
            kind = "missing" if isinstance(error, MissingObjectError) else "damaged"
            self._trouble.tell(kind, f"record {key:.12}... counts for nothing: {first_line(error)}")
            return False
        except RemoteError:
            return False
        record(self._store, key, row)
        self._fetched.add(num_records=1)
        self._answers[key] = data
        if known is None:
            self._came.add(key)
        return True

    def _once(self, action: Callable[[Digest], None], digests: Iterable[Digest]) -> None:
        """Waits for `action` on all `digests`, which begins unless it has begun. Raises what it raises."""
        wanted = [(action, digest) for digest in dict.fromkeys(digests)]
        with self._lock:
            for one in wanted:
                if one not in self._started:
                    self._started[one] = self._objects.submit(*one)
        for one in wanted:
            self._started[one].result()

    def _fetch(self, digest: Digest) -> None:
        if self._store.objects.has(digest):
            return
        try:
            self._reading.call(lambda: self._store.objects.put_chunks(digest, self._remote.chunks(digest)))
        except CorruptError:
            self._refused.add(digest)
            raise
        self._fetched.add(num_bytes=digest.size_bytes)

    def _send(self, key: str, row: Row) -> None:
        if key in self._came:
            return
        data = dump_record(key, row.model_dump(mode="json"))
        found = self._writing.call(lambda: self._remote.get_record(key))
        if found != data and found is not None and self._is_sound(key, found):
            return
        self._once(self._put, row.digests())
        if found != data:
            self._writing.call(lambda: self._remote.put_record(key, data))
            self._uploaded.add(num_records=1)
        self._answers[key] = data

    def _is_sound(self, key: str, data: bytes) -> bool:
        """Whether the remote's record suffices: nothing spoke against it, and its objects exist."""
        try:
            digests = set(digests_in(load_record(key, data)))
        except RecordError:
            return False
        if key in self._refused or digests & self._refused:
            return False
        return all(self._writing.call(partial(self._remote.has, digest)) for digest in digests)

    def _put(self, digest: Digest) -> None:
        if digest not in self._refused and self._writing.call(lambda: self._remote.has(digest)):
            return
        self._store.objects.verify(digest)
        path = self._store.objects.path(digest)
        self._writing.call(lambda: self._remote.put(digest, path))
        self._uploaded.add(num_bytes=digest.size_bytes)


def _done(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future


class _Trouble:
    """Warns once of each kind of trouble."""

    def __init__(self, label: str, warn: Callable[[str], None]) -> None:
        self._label, self._warn = label, warn
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def tell(self, kind: str, text: str) -> None:
        with self._lock:
            is_new = kind not in self._told
            self._told.add(kind)
        if is_new:
            self._warn(text if text.startswith(self._label) else f"{self._label}: {text}")


class _Health:
    """Whether a remote may still be asked. `after` says what is done without it."""

    def __init__(self, trouble: _Trouble, after: str) -> None:
        self.is_lost = False
        self._trouble, self._after = trouble, after
        self._num_failures, self._num_in_row = 0, 0
        self._first = ""
        self._lock = threading.Lock()

    def call(self, action: Callable[[], T]) -> T:
        """Returns the result of `action`. Raises RemoteError, also if the remote is lost, and what else `action` raises."""
        if self.is_lost:
            raise RemoteError("the remote is lost")
        try:
            result = action()
        except MissingObjectError:
            raise
        except RemoteError as error:
            self._failed(error)
            raise
        self._num_in_row = 0
        return result

    def tell(self) -> None:
        """Warns of failures that did not lose the remote."""
        if self._num_failures and not self.is_lost:
            self._trouble.tell(self._after, f"{self._first} ({self._num_failures} requests failed)")

    def _failed(self, error: RemoteError) -> None:
        with self._lock:
            self._num_failures += 1
            self._num_in_row += 1
            self._first = self._first or str(error)
            is_lost_now = not self.is_lost and (
                self._num_in_row >= _MOST_FAILURES or isinstance(error, NoAnswerError)
            )
            self.is_lost = self.is_lost or is_lost_now
        if is_lost_now:
            self._trouble.tell(self._after, f"{error}; {self._after}")


class _Count:
    """Counts records and bytes, and the time during which at least one transfer ran. Thread-safe."""

    def __init__(self) -> None:
        self.num_records, self.size_bytes, self.seconds = 0, 0, 0.0
        self._num_active, self._began = 0, 0.0
        self._lock = threading.Lock()

    def add(self, *, num_records: int = 0, num_bytes: int = 0) -> None:
        with self._lock:
            self.num_records += num_records
            self.size_bytes += num_bytes

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        with self._lock:
            if not self._num_active:
                self._began = time.monotonic()
            self._num_active += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_active -= 1
                if not self._num_active:
                    self.seconds += time.monotonic() - self._began


class _Threads:
    """At most `most` daemon threads. Unlike those of an executor, they keep no process alive that is interrupted."""

    def __init__(self, most: int) -> None:
        self._most, self._num = most, 0
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def submit(self, action: Callable[..., T], *arguments: object) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(action(*arguments))
            except BaseException as error:
                future.set_exception(error)

        self._waiting.put(run)
        if self._num < self._most:
            self._num += 1
            threading.Thread(target=self._work, daemon=True).start()
        return future

    def close(self) -> None:
        """Ends the threads once nothing is waiting."""
        for _ in range(self._num):
            self._waiting.put(None)

    def _work(self) -> None:
        while (run := self._waiting.get()) is not None:
            run()


MISS_SECONDS = 600.0
MOST_BYTES = 64 << 20
LARGEST_REMEMBERED_BYTES = 256 << 10
_BUSY_SECONDS = 1.0

Answers = Mapping[str, "bytes | None"]
"""Key -> the bytes of a record; None: the remote had none."""


class RememberedAnswers:
    """What a remote has answered to users of a store, so that a later build need not ask again.

    A record that the remote had is remembered until room is needed, and that it had none for ten minutes, in a `diskcache`
    per remote and user in the store's ``index/``. It may be removed at any time. Nothing in it is believed more than the
    remote: records are checked, and objects hashed. It costs a build nothing but time if it cannot be used: one that is
    damaged is removed and begun anew, and on a network file system, which SQLite cannot use safely, there is none.

    No method raises. Use it from one thread.
    """

    def __init__(self, folder: Path | None) -> None:
        """With None, nothing is remembered."""
        self._folder = folder
        self._cache: Cache | None = None

    @classmethod
    def of(cls, store: Store, url: str) -> RememberedAnswers:
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
