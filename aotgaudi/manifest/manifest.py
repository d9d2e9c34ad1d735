"""The manifest: a resolved spec and everything that it says must be warm. Machine-independent, hashed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from types import MappingProxyType

from aotgaudi.digest import canonical_json, canonical_row, sha256_pieces
from aotgaudi.entries import ENTRY_KINDS, Entry
from aotgaudi.manifest.enumerate import enumerate_entries
from aotgaudi.spec.build_spec import BuildSpec

MANIFEST_SCHEMA = "aotgaudi.manifest/2"

_BATCH = 10_000


@dataclass(frozen=True)
class Manifest:
    """`entries` are grouped by kind in the order of `ENTRY_KINDS`, and distinct; their order is kept."""

    spec: BuildSpec
    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        kinds = [kind for kind, _ in groupby(self.entries, key=attrgetter("kind"))]
        if kinds != [kind for kind in ENTRY_KINDS if kind in kinds]:
            raise ValueError(f"entries are not grouped in the order {', '.join(ENTRY_KINDS)}")
        if len(set(self.entries)) != len(self.entries):
            raise ValueError("an entry occurs twice")

    @classmethod
    def of(cls, spec: BuildSpec) -> Manifest:
        """Returns the manifest that a spec enumerates to. Raises SpecError."""
        return cls(spec, enumerate_entries(spec))

    @cached_property
    def id(self) -> str:
        """sha256 of the canonical (RFC 8785) JSON of all but the id itself, 64 hex digits.

        A receipt names its manifest by it.
        """
        return sha256_pieces(self._canonical_pieces())

    def of_kind(self, kind: str) -> tuple[Entry, ...]:
        """Returns the entries of one kind, in manifest order."""
        return self._by_kind.get(kind, ())

    @cached_property
    def _by_kind(self) -> Mapping[str, tuple[Entry, ...]]:
        groups = groupby(self.entries, key=attrgetter("kind"))
        return MappingProxyType({kind: tuple(entries) for kind, entries in groups})

    def _canonical_pieces(self) -> Iterator[bytes]:
        """Yields the canonical JSON that the id is the hash of, in pieces: a manifest may have a million rows."""
        yield b'{"entries":{'
        for index, kind in enumerate(sorted(ENTRY_KINDS)):
            columns = canonical_row(ENTRY_KINDS[kind].columns())
            yield f'{"," if index else ""}"{kind}":{{"columns":{columns},"rows":['.encode()
            for first, batch in batches(self.of_kind(kind)):
                rows = ",".join([canonical_row(entry.row()) for entry in batch])
                yield f"{',' if first else ''}{rows}".encode()
            yield b"]}"
        yield b'},"schema":' + canonical_json(MANIFEST_SCHEMA)
        yield b',"spec":' + canonical_json(self.spec.to_json()) + b"}"


def batches(entries: tuple[Entry, ...]) -> Iterator[tuple[int, tuple[Entry, ...]]]:
    """Yields entries by the thousand, each batch with the place of its first."""
    for first in range(0, len(entries), _BATCH):
        yield first, entries[first : first + _BATCH]
