"""Transfers objects to and from remotes: in parallel, with retries, from the first remote that has them intact.

An object is received into a partial file, and gets its name only when it is verified. We hash bytes as we write them, and
never write more than the digest allows. A partial file from an earlier run is hashed first and then continued. If the whole
does not match the digest, we start again once, because the file may belong to another transfer. The process that fills a
partial file locks it. Another process waits, and then finds the object.

Remotes are asked in order. A remote that cannot be used is not asked again. A remote with one bad object is still asked for
others. Each such remote gives one warning, and the transfer fails only if no remote has an object.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from aotgaudi.digest import Digest
from aotgaudi.errors import (
    AotGaudiError,
    CorruptError,
    MissingObjectError,
    RemoteError,
    StoreError,
    store_error,
)
from aotgaudi.files import make_directories, place
from aotgaudi.share.remote import Remote, TransientError
from aotgaudi.store.cas import find_fault

_CHUNK_BYTES = 1 << 20
_MODE = 0o444
_PROGRESS_BYTES = 1 << 20
"""A connection that broke after this much data does not count as a failed attempt."""

T = TypeVar("T")
Fill = Callable[["Partial"], None]


# Trying again


@dataclass(frozen=True)
class Retry:
    """At most `num_attempts`, with waits of 0.5, 1, 2, ... seconds between them, none above `longest_wait_seconds`.

    No attempt begins once `longest_seconds` have passed since the first began, so that slow attempts are few.

    Tests pass their own `sleep` and `clock` (seconds, monotonic).
    """

    num_attempts: int = 5
    first_wait_seconds: float = 0.5
    longest_wait_seconds: float = 20.0
    longest_seconds: float = 60.0
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def call(self, action: Callable[[], T]) -> T:
        """Runs `action` until it raises no TransientError. Raises the last TransientError, and any other error at once."""
        began = self.clock()
        for attempt in range(self.num_attempts - 1):
            try:
                return action()
            except TransientError as error:
                if self.is_over(began):
                    raise
                self.wait(attempt, error)
        return action()

    def is_over(self, began: float) -> bool:
        """Returns whether it is too late for another attempt. The first one began at `began` (by `clock`)."""
        return self.clock() - began > self.longest_seconds

    def wait(self, attempt: int, error: TransientError) -> None:
        """Waits after failure number `attempt` (from 0), longer if the remote asked for it, but within our limit."""
        backoff = self.first_wait_seconds * 2**attempt
        asked = backoff if error.wait_seconds is None else max(backoff, error.wait_seconds)
        self.sleep(min(asked, self.longest_wait_seconds))


# Receiving


class Partial:
    """A file being received. Methods raise OSError."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Hashes the bytes that the file has already."""
        self.path = path
        self._descriptor = descriptor
        self._state, self.size_bytes = hashlib.sha256(), 0
        while chunk := os.read(descriptor, _CHUNK_BYTES):
            self._state.update(chunk)
            self.size_bytes += len(chunk)

    def write(self, chunk: bytes) -> None:
        """Appends all of `chunk`."""
        view = memoryview(chunk)
        while view:
            view = view[os.write(self._descriptor, view) :]
        self._state.update(chunk)
        self.size_bytes += len(chunk)

    def restart(self) -> None:
        """Drops all received bytes."""
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self._state, self.size_bytes = hashlib.sha256(), 0

    def is_whole(self, digest: Digest) -> bool:
        """Returns whether the received bytes match `digest`."""
        return Digest(self._state.hexdigest(), self.size_bytes) == digest

    def set_mode(self, mode: int) -> None:
        """Sets the file's mode."""
        os.fchmod(self._descriptor, mode)

    def sync(self) -> None:
        """Syncs the file to the device."""
        os.fsync(self._descriptor)


def receive(digest: Digest, partial: Path, path: Path, fill: Fill, *, is_staged: bool = False) -> bool:
    """Calls `fill` to complete the file `partial`, and renames it to `path`.

    Returns False if the object was already there, intact. A file that `fill` leaves unfinished stays, to be continued. On
    return, the object is durable and was read back. With `is_staged`, the caller does both for all files together. Raises
    StoreError, and what `fill` raises.
    """
    if find_fault(path, digest) is None:
        return False
    try:
        make_directories(partial.parent)
        with _locked(partial) as file:
            if find_fault(path, digest) is None:  # Another process was faster.
                partial.unlink()
                return False
            require_room(partial.parent, digest.size_bytes - file.size_bytes)
            fill(file)
            file.set_mode(_MODE)
            if is_staged:
                path.parent.mkdir(parents=True, exist_ok=True)
                os.rename(partial, path)
                return True
            file.sync()
            place(partial, path, lambda: find_fault(path, digest) is None)
    except OSError as error:
        raise store_error("receive an object to", path, error, needed_bytes=digest.size_bytes) from error
    _verify_written(path, digest)
    return True


def require_room(directory: Path, num_bytes: int) -> None:
    """Raises StoreError unless `num_bytes` more fit below `directory`, which need not exist yet.

    This compares the size that a remote claims with the free space before the transfer, not when the disk is full.
    """
    while not directory.exists():
        directory = directory.parent
    try:
        status = os.statvfs(directory)
    except OSError as error:
        raise store_error("look at", directory, error) from error
    free_bytes = status.f_bavail * status.f_frsize
    if num_bytes > free_bytes:
        raise StoreError(
            f"there is no room for {num_bytes} bytes at {directory}: {free_bytes} are free (free space there, or"
            " use another place; if that is far more than the bundle should have, do not trust the remote)"
        )


def fill_from(
    remote: Remote, digest: Digest, partial: Partial, retry: Retry, advance: Callable[[int], None]
) -> None:
    """Completes `partial` from `remote`, and continues where an attempt broke off.

    Calls `advance` with the number of bytes that were received or (negative) dropped again. Raises CorruptError if the
    remote's bytes do not match the digest, RemoteError, and MissingObjectError.
    """
    is_continued, may_restart, attempt = partial.size_bytes > 0, True, 0
    began = retry.clock()
    is_ended = partial.size_bytes >= digest.size_bytes
    while not partial.is_whole(digest):
        if is_ended:
            _drop(partial, advance)
            if not (is_continued and may_restart):
                raise CorruptError(f"{remote.label}: object {digest}: its bytes are not what its digest says")
            is_continued = may_restart = False
        before = partial.size_bytes
        try:
            _receive_rest(remote, digest, partial, advance)
            is_ended = True
        except TransientError as error:
            is_ended, is_continued = False, partial.size_bytes > 0
            if partial.size_bytes - before >= _PROGRESS_BYTES:
                attempt, began = -1, retry.clock()
            attempt += 1
            if attempt >= retry.num_attempts or retry.is_over(began):
                raise
            retry.wait(max(attempt - 1, 0), error)


def _receive_rest(remote: Remote, digest: Digest, partial: Partial, advance: Callable[[int], None]) -> None:
    """Makes one attempt to receive all that the remote has, up to one byte too much. Raises TransientError."""
    with remote.read(digest, partial.size_bytes) as download:
        if download.offset != partial.size_bytes:
            _drop(partial, advance)
        if download.offset not in (0, partial.size_bytes):
            raise TransientError(f"{remote.label}: object {digest}: comes from byte {download.offset} on")
        for chunk in download.chunks:
            part = chunk[: digest.size_bytes - partial.size_bytes + 1]
            partial.write(part)
            advance(len(part))
            if partial.size_bytes > digest.size_bytes:
                return


def _drop(partial: Partial, advance: Callable[[int], None]) -> None:
    advance(-partial.size_bytes)
    partial.restart()


def _verify_written(path: Path, digest: Digest) -> None:
    fault = find_fault(path, digest)
    if fault is not None:
        raise StoreError(f"what was written to {path} reads back differently: {fault.reason}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[Partial]:
    """Opens or creates the file at `path`, waits until it is ours, and yields it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        descriptor = os.open(path, flags, 0o600)
        try:
            with contextlib.suppress(OSError):  # Without locks, two may fill it; verifying finds that.
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(path, descriptor):
                yield Partial(path, descriptor)
                return
        finally:
            os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Returns whether the name still means the open file. The process that held the lock may have renamed it."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


NUM_THREADS = 8
"""More threads than cores, because transfers wait for networks, but few enough for a registry."""

Item = TypeVar("Item")


class StoppedError(RemoteError):
    """A transfer was stopped, because another one failed or the user interrupted it."""


def _ignore(_: object) -> None:
    """Does nothing."""


@dataclass(frozen=True)
class Conduct:
    """How transfers run and report. `advance` is called with numbers of bytes, from any thread, `warn` with one line."""

    retry: Retry = field(default_factory=Retry)
    num_threads: int = NUM_THREADS
    advance: Callable[[int], None] = _ignore
    warn: Callable[[str], None] = _ignore


def in_threads(
    action: Callable[[Item], T], items: Iterable[Item], num_threads: int, stop: threading.Event | None = None
) -> list[T]:
    """Runs `action` on each item, in threads, and returns the results in order. Raises the first error.

    After an error, no further item begins, `stop` is set, and running items are awaited. Ctrl-C does not wait, because the
    threads may hang in a connection. They are daemons, and nothing is lost if they are abandoned.
    """
    stop = stop or threading.Event()
    rows = list(items)
    waiting = deque(range(len(rows)))
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def work() -> None:
        while not errors and not stop.is_set():
            try:
                number = waiting.popleft()
            except IndexError:
                return
            try:
                results[number] = action(rows[number])
            except BaseException as error:
                errors.append(error)
                stop.set()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(num_threads, len(rows)))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        stop.set()
        raise
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(rows))]


class Sources:
    """Remotes to receive from, in order of preference. Thread-safe."""

    def __init__(self, remotes: Sequence[Remote], conduct: Conduct) -> None:
        self.conduct = conduct
        self._remotes = tuple(remotes)
        self._unusable: dict[str, RemoteError] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()

    @property
    def usable(self) -> tuple[Remote, ...]:
        """The remotes that have not failed."""
        return tuple(remote for remote in self._remotes if remote.label not in self._unusable)

    def ask(self, remote: Remote, action: Callable[[], T]) -> T | None:
        """Returns the result of `action` on `remote`, with retries. If the remote cannot be used, warns and returns None."""
        try:
            return self.conduct.retry.call(action)
        except MissingObjectError:
            raise
        except RemoteError as error:
            self._give_up(remote, error)
        return None

    def fill(self, digest: Digest, partial: Partial, *, is_counted: bool = True) -> None:
        """Completes `partial` from the first remote that has the object intact, and counts the bytes as done.

        Raises CorruptError if some have it but none has it intact, MissingObjectError if none has it, and RemoteError if no
        remote could be used.
        """
        failures: list[AotGaudiError] = []
        advance = self._advance if is_counted else self._check
        advance(partial.size_bytes)
        for remote in self.usable:
            try:
                fill_from(remote, digest, partial, self.conduct.retry, advance)
                return
            except StoppedError:
                raise
            except (CorruptError, MissingObjectError) as error:
                failures.append(error)
                if isinstance(error, CorruptError):
                    self.conduct.warn(str(error))
            except RemoteError as error:
                failures.append(error)
                self._give_up(remote, error)
        raise self._failure(digest, failures)

    def require_usable(self) -> None:
        """Raises the error of the remotes if none can be used any more."""
        if not self.usable:
            raise next(iter(self._unusable.values()))

    def each(self, action: Callable[[Item], T], items: Iterable[Item]) -> list[T]:
        """Runs `action`, which receives, on each item as `in_threads` does. After an error, no further call is possible."""
        return in_threads(action, items, self.conduct.num_threads, self._stop)

    def _advance(self, num_bytes: int) -> None:
        self._check(num_bytes)
        self.conduct.advance(num_bytes)

    def _check(self, num_bytes: int) -> None:
        """Raises StoppedError if the transfers were stopped. A replacement of `_advance` that counts no bytes."""
        if self._stop.is_set():
            raise StoppedError("stopped")

    def _give_up(self, remote: Remote, error: RemoteError) -> None:
        with self._lock:
            is_first = remote.label not in self._unusable
            self._unusable.setdefault(remote.label, error)
        if is_first and len(self._remotes) > 1:
            self.conduct.warn(f"{error}; going on without this remote")

    def _failure(self, digest: Digest, failures: Sequence[AotGaudiError]) -> AotGaudiError:
        for kind in (CorruptError, MissingObjectError):
            for error in failures:
                if type(error) is kind:
                    return error
        if failures:
            return failures[0]
        self.require_usable()
        return MissingObjectError(f"no remote has object {digest}")


def send(
    remote: Remote, files: Mapping[Digest, Path], conduct: Conduct, *, overwrite: bool = False
) -> tuple[int, int]:
    """Uploads the `files` that `remote` lacks (with `overwrite`, all of them), largest first.

    Returns how many were uploaded, and their bytes. Raises CorruptError for a file that does not match its digest,
    RemoteError, and StoreError.
    """

    def send_one(digest: Digest) -> int:
        retry = conduct.retry
        if not overwrite and retry.call(lambda: remote.has(digest)):
            conduct.advance(digest.size_bytes)
            return -1
        retry.call(lambda: remote.put(digest, files[digest]))
        conduct.advance(digest.size_bytes)
        return digest.size_bytes

    ordered = sorted(files, key=lambda digest: (-digest.size_bytes, digest.sha256))
    sizes = [size for size in in_threads(send_one, ordered, conduct.num_threads) if size >= 0]
    return len(sizes), sum(sizes)
