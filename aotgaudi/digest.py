"""Names content: digests, canonical JSON, and keys made of named components.

* sha256 names everything that is trusted.
* Canonical JSON is RFC 8785 (JCS), so that equal values have equal bytes on every machine.
* A key is a list of named components. Each name and each value is length-framed (``<len>:<bytes>``) before it is hashed,
  so moving a character from one field to the next changes the key. A key keeps its components, so a comparison of two
  keys can name the component that differs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Union

import rfc8785

Scalar = Union[int, float, bool, str]

_CHUNK_BYTES = 1 << 20
_DIGEST = re.compile(r"sha256:([0-9a-f]{64}):([0-9]+)")
_LARGEST_INTEGER = 2**53 - 1


def sha256_bytes(data: bytes) -> str:
    """Returns the sha256 of `data` as 64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_pieces(pieces: Iterable[bytes]) -> str:
    """Returns the sha256 of the concatenated `pieces` as 64 lower-case hex digits."""
    state = hashlib.sha256()
    for piece in pieces:
        state.update(piece)
    return state.hexdigest()


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


def canonical_row(values: Iterable[Scalar]) -> str:
    """Returns the RFC 8785 form of a list of scalars. Same result as `canonical_json`, but fast enough for a million rows.

    Raises:
        ValueError: like `canonical_json`, for an integer beyond 2**53 - 1 or a number that is not finite.
    """
    return f"[{','.join([_SCALAR_FORMS[type(value)](value) for value in values])}]"


def _integer_form(value: int) -> str:
    if -_LARGEST_INTEGER <= value <= _LARGEST_INTEGER:
        return int.__repr__(value)
    raise ValueError(f"{value} is not an integer that JSON can hold exactly (at most {_LARGEST_INTEGER})")


def _other_form(value: Scalar) -> str:
    return canonical_json(value).decode()


_SCALAR_FORMS: Mapping[type, Callable[[Any], str]] = MappingProxyType(
    {
        int: _integer_form,
        bool: {False: "false", True: "true"}.__getitem__,
        float: _other_form,
        str: _other_form,
    }
)


@dataclass(frozen=True, slots=True)
class Digest:
    """The sha256 and the size in bytes of one blob, written ``sha256:<hex>:<size>``."""

    sha256: str
    size_bytes: int

    @classmethod
    def of(cls, data: bytes) -> Digest:
        """Returns the digest of `data`."""
        return cls(sha256_bytes(data), len(data))

    @classmethod
    def parse(cls, text: str) -> Digest:
        """Parses ``sha256:<64 hex>:<size>``. Raises ValueError."""
        found = _DIGEST.fullmatch(text)
        if found is None:
            raise ValueError(f"not a digest: {text!r}")
        return cls(found[1], int(found[2]))

    def __str__(self) -> str:
        return f"sha256:{self.sha256}:{self.size_bytes}"


def framed(components: Iterable[tuple[str, str]]) -> bytes:
    """Returns the bytes that a key hashes: every name and value as ``<length in bytes>:<UTF-8>``."""
    texts = [text.encode() for row in components for text in row]
    return b"".join([b"%d:%s" % (len(text), text) for text in texts])


@dataclass(frozen=True, slots=True)
class Key:
    """Named components, hashed in order. Names are unique within a key."""

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
        return sha256_bytes(framed(self.components))

    def differences(self, other: Key) -> tuple[tuple[str, str | None, str | None], ...]:
        """Returns ``(name, here, there)`` of every component that differs; None where a key lacks it."""
        return differing(dict(self.components), dict(other.components))


def differing(
    old: Mapping[str, str], new: Mapping[str, str]
) -> tuple[tuple[str, str | None, str | None], ...]:
    """Returns ``(name, old, new)`` of every component that differs, in the order of `old`; None where a side lacks it."""
    names = dict.fromkeys((*old, *new))
    return tuple((name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name))
