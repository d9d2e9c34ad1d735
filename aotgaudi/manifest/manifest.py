"""The manifest: a resolved spec and everything that it says must be warm. Machine-independent, hashed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from aotgaudi.digest import canonical_json, sha256_bytes
from aotgaudi.manifest.entries import ENTRY_KINDS, Entry
from aotgaudi.manifest.enumerate import enumerate_entries
from aotgaudi.spec.build_spec import BuildSpec

MANIFEST_SCHEMA = "aotgaudi.manifest/1"


@dataclass(frozen=True)
class Manifest:
    """`entries` are grouped by kind in the order of `ENTRY_KINDS`, and distinct; their order is kept."""

    spec: BuildSpec
    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        place = {kind: index for index, kind in enumerate(ENTRY_KINDS)}
        places = [place[entry.kind] for entry in self.entries]
        if places != sorted(places):
            raise ValueError(f"entries are not grouped in the order {', '.join(ENTRY_KINDS)}")
        if len(set(self.entries)) != len(self.entries):
            raise ValueError("an entry occurs twice")

    @classmethod
    def of(cls, spec: BuildSpec) -> Manifest:
        """Returns the manifest that a spec enumerates to. Raises SpecError."""
        return cls(spec, enumerate_entries(spec))

    @cached_property
    def id(self) -> str:
        """sha256 of the canonical JSON of `content`, 64 hex digits. A receipt names its manifest by it."""
        return sha256_bytes(canonical_json(self.content()))

    def content(self) -> dict[str, Any]:
        """Returns the manifest as a JSON value without its id, the spec in full."""
        return {
            "schema": MANIFEST_SCHEMA,
            "spec": self.spec.to_json(),
            "entries": {
                kind: {"columns": list(cls.columns()), "rows": [list(e.row()) for e in self.of_kind(kind)]}
                for kind, cls in ENTRY_KINDS.items()
            },
        }

    def of_kind(self, kind: str) -> tuple[Entry, ...]:
        """Returns the entries of one kind, in manifest order."""
        return tuple(entry for entry in self.entries if entry.kind == kind)
