"""Moving many objects between here and remotes: in parallel, with retries, from whichever remote has them intact.

Several remotes are asked in order. A remote that cannot be used is not asked again; one that has a bad object is still
asked for other objects. Each of them is warned about once, which is not a failure while another remote has what is needed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from aotgaudi.digest import Digest
from aotgaudi.errors import AotGaudiError, CorruptError, MissingObjectError, RemoteError
from aotgaudi.share.receiving import Partial, fill_from
from aotgaudi.share.remote import Remote
from aotgaudi.share.retry import Retry

NUM_THREADS = 8
"""Transfers wait for networks: more than there are cores, few enough for a registry."""

T = TypeVar("T")
Item = TypeVar("Item")


class StoppedError(RemoteError):
    """A transfer that was told to stop, because another one failed or the user wants it."""


def _ignore(_: object) -> None:
    """Shows nothing."""


@dataclass(frozen=True)
class Conduct:
    """How transfers run, and whom they tell.

    `advance` is told how many bytes are done, also from threads; `warn` gets one line.
    """

    retry: Retry = field(default_factory=Retry)
    num_threads: int = NUM_THREADS
    advance: Callable[[int], None] = _ignore
    warn: Callable[[str], None] = _ignore


def in_threads(
    action: Callable[[Item], T], items: Iterable[Item], num_threads: int, stop: threading.Event | None = None
) -> list[T]:
    """Runs `action` on each item, in threads; returns the results in order. Raises the first error.

    After an error nothing is begun any more, `stop` is set, and what is under way is waited for. Ctrl-C does not wait:
    the threads may hang in a connection, and nothing is lost by leaving them (they are daemons).
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
    """Remotes to receive from, in order of preference. Safe in threads."""

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
        """Runs `action` on `remote`, with retries; None, and a warning, where the remote cannot be used."""
        try:
            return self.conduct.retry.call(action)
        except MissingObjectError:
            raise
        except RemoteError as error:
            self._give_up(remote, error)
        return None

    def fill(self, digest: Digest, partial: Partial, *, is_counted: bool = True) -> None:
        """Completes `partial` from the first remote that has the object intact, and counts the bytes as done.

        Raises CorruptError if some had it and none had it intact, MissingObjectError if none has it, RemoteError if
        none could be used.
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
        """Raises what went wrong where no remote can be used any more."""
        if not self.usable:
            raise next(iter(self._unusable.values()))

    def each(self, action: Callable[[Item], T], items: Iterable[Item]) -> list[T]:
        """Runs `action`, which receives, on each item in threads; see `in_threads`. After an error, never again."""
        return in_threads(action, items, self.conduct.num_threads, self._stop)

    def _advance(self, num_bytes: int) -> None:
        self._check(num_bytes)
        self.conduct.advance(num_bytes)

    def _check(self, num_bytes: int) -> None:
        """Counts nothing."""
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
    """Uploads those `files` that `remote` lacks, largest first; all of them where it is to `overwrite`.

    Returns how many were uploaded, and their bytes. Raises CorruptError for a file that is not what its digest says,
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
