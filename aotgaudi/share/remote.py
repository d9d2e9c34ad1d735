"""Remotes: places where stores and bundles are shared. What a remote must offer, and what is kept there.

A remote holds three kinds of things. Objects are named by their digest. Records are named by their key, as in a store
(records.py). A pointer is a name that people choose (``latest``, ``v1.2``) for a bundle. A writer puts objects first, then
what names them, so a reader of a record or a pointer finds its objects.

We do not trust a remote: we hash the objects that we receive (transfer.py) and check the records. Two writers of one object
or record write equally good bytes, so the last one may win.

A pointer is the canonical JSON (RFC 8785) of::

    {"index":     digest of the bundle's index,
     "schema":    "aotgaudi.pointer/1",
     "signature": digest of the bundle's signature, or null}

Versions: 1 (first).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from pydantic import Field

from aotgaudi.digest import Digest
from aotgaudi.document import DigestField, Document, load_document
from aotgaudi.errors import RemoteError

POINTER_SCHEMA: Literal["aotgaudi.pointer/1"] = "aotgaudi.pointer/1"
MAX_POINTER_BYTES = 4096

T = TypeVar("T")

_USER_INFO = re.compile(r"://[^/@\s]*@")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class Pointer(Document):
    """Which bundle a name means."""

    schema_: Literal["aotgaudi.pointer/1"] = Field(default=POINTER_SCHEMA, alias="schema")
    index: DigestField
    signature: DigestField | None = None


def load_pointer(data: bytes) -> Pointer:
    """Parses the bytes of a pointer. Raises ManifestError, which says what is wrong."""
    return load_document(data, Pointer, "pointer")


def check_name(name: str) -> str:
    """Returns `name` where it can name a bundle in every kind of remote. Raises RemoteError."""
    if not _NAME.fullmatch(name):
        raise RemoteError(
            f"{name!r:.150} is no name for a bundle (at most 128 letters, digits, '.', '_', '-';"
            " the first is no '.' or '-')"
        )
    return name


def without_password(url: str) -> str:
    """Returns a URL as messages show it: without a user and a password."""
    return _USER_INFO.sub("://", url)


@dataclass(frozen=True, slots=True)
class Download:
    """An object's bytes from `offset` on: what was asked for, or 0 where the remote cannot start elsewhere."""

    offset: int
    chunks: Iterator[bytes]


class Remote(Protocol):
    """Where objects, records and bundles are shared. Safe in threads.

    Every method raises TransientError where another try may help, and RemoteError where none will.
    """

    @property
    def label(self) -> str:
        """How the remote is called in messages; without credentials."""
        ...

    def has(self, digest: Digest) -> bool:
        """Whether an object of this name and size is there. It is not read."""
        ...

    def read(self, digest: Digest, offset: int = 0) -> AbstractContextManager[Download]:
        """Opens an object, from `offset` on where the remote can. Raises MissingObjectError."""
        ...

    def put(self, digest: Digest, path: Path) -> None:
        """Uploads the file at `path`, whole or not at all. Raises CorruptError where it is not `digest`."""
        ...

    def get_record(self, key: str) -> bytes | None:
        """Returns the bytes recorded for `key`, unverified; None if there are none."""
        ...

    def put_record(self, key: str, data: bytes, digests: Iterable[Digest]) -> None:
        """Records `data` for `key`, replacing any record. `digests` are the objects that it names."""
        ...

    def resolve(self, name: str) -> Pointer | None:
        """Returns the pointer that `name` has at this moment; None if there is no such name."""
        ...

    def publish(self, name: str, pointer: Pointer, digests: Iterable[Digest]) -> str:
        """Points `name` at the bundle of `pointer`, whose `digests` are there. Returns a reference to just that bundle."""
        ...


# Trying again


class TransientError(RemoteError):
    """A remote that may answer when it is asked again. `wait_seconds` is what it asked for, if it did."""

    def __init__(self, message: str, wait_seconds: float | None = None) -> None:
        super().__init__(message)
        self.wait_seconds = wait_seconds


@dataclass(frozen=True)
class Retry:
    """At most `num_attempts`, with waits of 0.5, 1, 2, ... seconds between them, none above `longest_wait_seconds`.

    No attempt begins once `longest_seconds` have passed since the first began, so slow attempts are few.

    Tests bring their own `sleep` and `clock` (seconds, monotonic).
    """

    num_attempts: int = 5
    first_wait_seconds: float = 0.5
    longest_wait_seconds: float = 20.0
    longest_seconds: float = 60.0
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def call(self, action: Callable[[], T]) -> T:
        """Runs `action` until it raises no TransientError. Raises the last one, and every other error at once."""
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
        """Whether no attempt may begin any more, the first having begun at `began` (by `clock`)."""
        return self.clock() - began > self.longest_seconds

    def wait(self, attempt: int, error: TransientError) -> None:
        """Waits after the failure number `attempt` (from 0): as long as the remote asked for, within our bound."""
        backoff = self.first_wait_seconds * 2**attempt
        asked = backoff if error.wait_seconds is None else max(backoff, error.wait_seconds)
        self.sleep(min(asked, self.longest_wait_seconds))
