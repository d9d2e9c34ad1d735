"""Roots name the records and objects that a collector must keep, however large the store is.

``roots/<name>.json`` is the canonical JSON (RFC 8785) of::

    {"keys":    [keys of records that are kept, with every object that they name],
     "name":    the root's name,
     "objects": [digests of objects that are kept],
     "schema":  "aotgaudi.root/1"}

Both lists are ascending, without repetitions. Versions: 1 (first). A root lists everything that it protects, so that this
does not depend on any other file. A root that cannot be read stops the collector, since nothing may be removed on a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_serializer

from aotgaudi.document import DigestField, Document, Sha256, load_document
from aotgaudi.errors import CorruptError, ManifestError, StoreError, store_error
from aotgaudi.files import make_directories, write_atomic
from aotgaudi.store.cas import remove

ROOT_SCHEMA: Literal["aotgaudi.root/1"] = "aotgaudi.root/1"

_NAME = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z._-]{0,127}")


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"not a root's name (letters, digits, '.', '_', '-'): {name!r:.150}")
    return name


class Root(Document):
    """The records (by key) and objects that are kept under `name`. Raises ValueError for a malformed name or key."""

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
        try:
            if path.is_file() and path.read_bytes() == data:
                return
            make_directories(path.parent)
        except OSError as error:
            raise store_error("write", path, error, needed_bytes=len(data)) from error
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
