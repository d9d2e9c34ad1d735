"""Roots: what is kept whatever the size of the store.

``roots/<name>.json`` is the canonical JSON (RFC 8785) of::

    {"keys":    [keys of records that are kept, with every object that they name],
     "name":    the root's name,
     "objects": [digests of objects that are kept],
     "schema":  "aotgaudi.root/1"}

Both lists ascend, each item once. Versions: 1 (first). A root says all that a collector must know, so that
what it protects does not depend on any other file. A root that cannot be read stops the collector: nothing is
removed on a guess.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotgaudi.atomicfile import write_atomic
from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, StoreError
from aotgaudi.store.faults import store_error
from aotgaudi.store.writing import make_directories

ROOT_SCHEMA = "aotgaudi.root/1"

_NAME = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z._-]{0,127}")
_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Root:
    """What is kept under `name`: records by key, and objects. Raises ValueError for a name or key that is none."""

    name: str
    keys: frozenset[str] = frozenset()
    objects: frozenset[Digest] = frozenset()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"not a root's name (letters, digits, '.', '_', '-'): {self.name!r:.150}")
        if any(not _KEY.fullmatch(key) for key in self.keys):
            raise ValueError(f"root {self.name}: a key is not 64 lower-case hex digits")

    def dumps(self) -> bytes:
        """Returns the file form."""
        document = {
            "keys": sorted(self.keys),
            "name": self.name,
            "objects": sorted(map(str, self.objects)),
            "schema": ROOT_SCHEMA,
        }
        return json.dumps(document, separators=(",", ":")).encode()  # ASCII strings: this is canonical.


def load_root(name: str, data: bytes) -> Root:
    """Parses the file form of the root `name`. Raises ValueError, which says what is wrong."""
    try:
        document: Any = json.loads(data)
    except RecursionError as error:
        raise ValueError(f"is not JSON: {error}") from error
    match document:
        case {
            "schema": str(schema),
            "name": str(found),
            "keys": list(keys),
            "objects": list(objects),
            **rest,
        }:
            if schema != ROOT_SCHEMA or rest:
                raise ValueError(f"is not of the schema {ROOT_SCHEMA}")
            root = Root(
                found, frozenset(map(_text, keys)), frozenset(Digest.parse(_text(o)) for o in objects)
            )
        case _:
            raise ValueError("is not a root")
    if root.name != name or root.dumps() != data:
        raise ValueError("is another root, or is not in its canonical form")
    return root


class Roots:
    """The roots of the store at `root`."""

    def __init__(self, root: Path) -> None:
        self._directory = root / "roots"

    def put(self, root: Root) -> None:
        """Keeps `root`, in place of an earlier one of its name. Writes nothing where it is the same.

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
        """Returns a root. Raises StoreError when there is none of that name, CorruptError when it is no root."""
        path = self._path(name)
        try:
            return load_root(name, path.read_bytes())
        except FileNotFoundError as error:
            raise StoreError(f"there is no root {name!r} in {self._directory}") from error
        except OSError as error:
            raise store_error("read", path, error) from error
        except ValueError as error:
            raise CorruptError(
                f"root {path}: {error} (until it is removed or kept anew, nothing is collected)"
            ) from error

    def remove(self, name: str) -> None:
        """Removes a root; what it alone kept may then be collected. Raises StoreError when there is none."""
        path = self._path(name)
        try:
            path.unlink()
        except FileNotFoundError as error:
            raise StoreError(f"there is no root {name!r} in {self._directory}") from error
        except OSError as error:
            raise store_error("remove", path, error) from error

    def names(self) -> tuple[str, ...]:
        """The names of all roots, ascending."""
        return tuple(
            sorted(path.stem for path in self._directory.glob("*.json") if _NAME.fullmatch(path.stem))
        )

    def __iter__(self) -> Iterator[Root]:
        """Every root, by name. Raises CorruptError."""
        return map(self.get, self.names())

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise StoreError(f"not a root's name (letters, digits, '.', '_', '-'): {name!r:.150}")
        return self._directory / f"{name}.json"


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("lists something that is no string")
    return value
