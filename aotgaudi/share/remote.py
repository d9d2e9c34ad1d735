"""Remotes, where stores and bundles are shared: the methods that a remote must have, and what it holds.

A remote holds objects, records and pointers. Objects are named by their digest. Records are named by their key, as in a
store (records.py). A pointer is a name that people choose (``latest``, ``v1.2``) for a bundle. A writer uploads objects
before the records and pointers that name them, so a reader of a record or a pointer finds its objects.

We do not trust a remote. We hash the objects that we receive (transfer.py) and check the records. Two writers of one object
or record write equally good bytes, so the last one may win.

A pointer is the canonical JSON (RFC 8785) of::

    {"index":     digest of the bundle's index,
     "schema":    "aotgaudi.pointer/1",
     "signature": digest of the bundle's signature, or null}

Versions: 1 (first).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pydantic import Field

from aotgaudi.digest import Digest
from aotgaudi.document import DigestField, Document, load_document
from aotgaudi.errors import RemoteError

POINTER_SCHEMA: Literal["aotgaudi.pointer/1"] = "aotgaudi.pointer/1"
MAX_POINTER_BYTES = 4096

_USER_INFO = re.compile(r"://[^/@\s]*@")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class Pointer(Document):
    """The bundle that a name means."""

    schema_: Literal["aotgaudi.pointer/1"] = Field(default=POINTER_SCHEMA, alias="schema")
    index: DigestField
    signature: DigestField | None = None


def load_pointer(data: bytes) -> Pointer:
    """Parses the bytes of a pointer. Raises ManifestError."""
    return load_document(data, Pointer, "pointer")


def check_name(name: str) -> str:
    """Returns `name` if it can name a bundle in every kind of remote. Otherwise raises RemoteError."""
    if not _NAME.fullmatch(name):
        raise RemoteError(
            f"{name!r:.150} is no name for a bundle (at most 128 letters, digits, '.', '_', '-';"
            " the first is no '.' or '-')"
        )
    return name


def without_password(url: str) -> str:
    """Returns a URL without user and password, for messages."""
    return _USER_INFO.sub("://", url)


@dataclass(frozen=True, slots=True)
class Download:
    """An object's bytes from `offset` on. This is the requested offset, or 0 if the remote can only start there."""

    offset: int
    chunks: Iterator[bytes]


class Remote(Protocol):
    """Where objects, records and bundles are shared. Thread-safe.

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

    def resolve(self, name: str) -> Pointer | None:
        """Returns the present pointer of `name`; None if there is no such name."""
        ...

    def publish(self, name: str, pointer: Pointer, digests: Iterable[Digest]) -> str:
        """Points `name` at the bundle of `pointer`, and returns a reference to exactly this bundle.

        All its `digests` must have been uploaded.
        """
        ...


class TransientError(RemoteError):
    """The remote may answer another try. `wait_seconds` is the wait that it asked for, if it did."""

    def __init__(self, message: str, wait_seconds: float | None = None) -> None:
        super().__init__(message)
        self.wait_seconds = wait_seconds
