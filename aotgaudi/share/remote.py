"""Remotes, where stores are shared: the methods that a remote must have, and what it holds.

A remote holds objects and records. Objects are named by their digest. Records are named by their key, as in a store
(records.py). A writer uploads objects before the records that name them, so a reader of a record finds its objects.

We do not trust a remote. We hash the objects that we receive (transfer.py) and check the records. Two writers of one object
or record write equally good bytes, so the last one may win.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from aotgaudi.digest import Digest
from aotgaudi.errors import RemoteError

_USER_INFO = re.compile(r"://[^/@\s]*@")


def without_password(url: str) -> str:
    """Returns a URL without user and password, for messages."""
    return _USER_INFO.sub("://", url)


@dataclass(frozen=True, slots=True)
class Download:
    """An object's bytes from `offset` on. This is the requested offset, or 0 if the remote can only start there."""

    offset: int
    chunks: Iterator[bytes]


class Remote(Protocol):
    """Where objects and records are shared. Thread-safe.

    Every method raises TransientError if another try may help, and RemoteError if it will not.
    """

    @property
    def label(self) -> str:
        """The remote's name in messages, without credentials."""
        ...

    def has(self, digest: Digest) -> bool:
        """Returns whether an object of this name and size is there. Does not read it."""
        ...

    def read(self, digest: Digest, offset: int = 0) -> AbstractContextManager[Download]:
        """Opens an object, from `offset` on if the remote supports that. Raises MissingObjectError."""
        ...

    def put(self, digest: Digest, path: Path) -> None:
        """Uploads the file at `path`, whole or not at all. Raises CorruptError if it does not match `digest`."""
        ...

    def get_record(self, key: str) -> bytes | None:
        """Returns the bytes recorded for `key`, which are not verified; None if there are none."""
        ...

    def put_record(self, key: str, data: bytes, digests: Iterable[Digest]) -> None:
        """Records `data` for `key`, in place of any earlier record. `digests` are the objects that it names."""
        ...


class TransientError(RemoteError):
    """The remote may answer another try. `wait_seconds` is the wait that it asked for, if it did."""

    def __init__(self, message: str, wait_seconds: float | None = None) -> None:
        super().__init__(message)
        self.wait_seconds = wait_seconds
