"""Names of content: digests, canonical JSON, and keys made of named components.

* sha256 names everything that trust rests on.
* Canonical JSON is RFC 8785 (JCS), so that equal values have equal bytes on every machine.
* A key is a list of named components. Each name and each value is length-framed before it is hashed
  (``<len>:<bytes>``), so that moving a character from one field to its neighbour changes the key. The
  components are kept, so that two keys can be compared and the component that differs can be named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rfc8785

_CHUNK_BYTES = 1 << 20


def sha256_bytes(data: bytes) -> str:
    """Returns the sha256 of `data` as 64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Returns the sha256 of a file's bytes as 64 lower-case hex digits. Raises OSError."""
    state = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            state.update(chunk)
    return state.hexdigest()


def canonical_json(value: Any) -> bytes:
    """Returns the RFC 8785 form of a JSON value (dict, list, str, int, float, bool, None)."""
    return rfc8785.dumps(value)


@dataclass(frozen=True, slots=True)
class Digest:
    """sha256 and size in bytes of one blob; written ``sha256:<hex>:<size>``."""

    sha256: str
    size_bytes: int

    @classmethod
    def of(cls, data: bytes) -> Digest:
        """Returns the digest of `data`."""
        return cls(sha256_bytes(data), len(data))

    @classmethod
    def parse(cls, text: str) -> Digest:
        """Parses ``sha256:<64 hex>:<size>``. Raises ValueError."""
        algorithm, hexdigits, size = text.split(":")
        if algorithm != "sha256" or len(hexdigits) != 64 or not set(hexdigits) <= set("0123456789abcdef"):
            raise ValueError(f"not a digest: {text!r}")
        if not (size.isascii() and size.isdigit()):
            raise ValueError(f"not a digest: {text!r}")
        return cls(hexdigits, int(size))

    def __str__(self) -> str:
        return f"sha256:{self.sha256}:{self.size_bytes}"


@dataclass(frozen=True, slots=True)
class Key:
    """A key: named components, hashed in order. Names are unique within a key."""

    components: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, components: Iterable[tuple[str, str]]) -> Key:
        """Returns the key of these components. Raises ValueError when a name occurs twice."""
        rows = tuple(components)
        names = [name for name, _ in rows]
        if len(set(names)) != len(names):
            raise ValueError(f"a key component occurs twice: {names}")
        return cls(rows)

    @property
    def hex(self) -> str:
        """The sha256 of the length-framed components, 64 hex digits."""
        state = hashlib.sha256()
        for row in self.components:
            for text in row:
                data = text.encode()
                state.update(b"%d:" % len(data))
                state.update(data)
        return state.hexdigest()

    def differences(self, other: Key) -> tuple[tuple[str, str | None, str | None], ...]:
        """Returns ``(name, here, there)`` of every component that differs; None where one lacks it."""
        here, there = dict(self.components), dict(other.components)
        names = list(dict.fromkeys([*here, *there]))
        return tuple((n, here.get(n), there.get(n)) for n in names if here.get(n) != there.get(n))
