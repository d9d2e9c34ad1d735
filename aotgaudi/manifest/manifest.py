"""The manifest: a resolved spec and everything that must be warm for it. Machine-independent, hashed, reviewed in diffs.

Grammar of a manifest file (JSON, UTF-8, one newline at the end; key order fixed; config keys sorted)::

    {
      "schema": "aotgaudi.manifest/2",
      "id": <64 hex: sha256 of the RFC 8785 form of this object without "id">,
      "spec": <the resolved spec, indented>,
      "entries": {
        "prompt": {
          "columns": ["batch_size", "query_len", "num_ctx_blocks"],
          "rows": [<one row a line, values in the order of the columns>]
        },
        "decode": <"batch_size", "query_len", "num_blocks">,
        "unified": <"query_len", "num_shared_blocks", "num_unique_blocks", "is_causal">,
        "vision": <"size", "is_batch">,
        "sampler": <"batch_size", "temperature", "top_p", "top_k", "batch_changed", "min_p",
                    "presence_penalty", "frequency_penalty", "repetition_penalty", "num_logprobs", "constraints"?,
                    "top_n_sigma"?>,
        "defrag": <"padded_swaps">,
        "mhc": <"num_tokens", "n_splits", "sublayer">
      }
    }

A row of a sampler ends after `num_logprobs`, or after the last later value that is not off. The columns are those of the
longest row.

Version history: 1, the first; 2 added unified, vision and mhc, and the sampler's columns from min_p on. The columns
`constraints` and `top_n_sigma` came later: manifests without them keep their ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from aotgaudi.digest import canonical_json, canonical_row, sha256_pieces
from aotgaudi.entries import ENTRY_KINDS, Entry, SamplerEntry
from aotgaudi.errors import ManifestError, SpecError
from aotgaudi.files import write_atomic
from aotgaudi.manifest.enumerate import enumerate_entries, require_sizes
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import first_mistake, load_spec

MANIFEST_SCHEMA = "aotgaudi.manifest/2"

_BATCH = 10_000


@dataclass(frozen=True)
class Manifest:
    """`entries` are grouped by kind in the order of `ENTRY_KINDS`, and distinct. Their order is kept."""

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
        """Returns the manifest that a spec enumerates to. Raises SpecError, also for sizes that no model can have."""
        require_sizes(spec)
        return cls(spec, enumerate_entries(spec))

    @cached_property
    def id(self) -> str:
        """sha256 of the canonical (RFC 8785) JSON of everything but the id, 64 hex digits.

        A receipt names its manifest by it.
        """
        return sha256_pieces(self._canonical_pieces())

    def of_kind(self, kind: str) -> tuple[Entry, ...]:
        """Returns the entries of one kind, in manifest order."""
        return self._by_kind.get(kind, ())

    def columns(self, kind: str) -> tuple[str, ...]:
        """Returns the names of the values in a row of `kind`."""
        names = ENTRY_KINDS[kind].columns()
        if kind != SamplerEntry.kind:
            return names
        widths = (len(entry.row()) for entry in self.of_kind(kind))
        return names[: max(widths, default=SamplerEntry.num_always_stored)]

    @cached_property
    def _by_kind(self) -> Mapping[str, tuple[Entry, ...]]:
        groups = groupby(self.entries, key=attrgetter("kind"))
        return MappingProxyType({kind: tuple(entries) for kind, entries in groups})

    def _canonical_pieces(self) -> Iterator[bytes]:
        """Yields the canonical JSON that the id hashes, in pieces, because a manifest may have a million rows."""
        yield b'{"entries":{'
        for index, kind in enumerate(sorted(ENTRY_KINDS)):
            columns = canonical_row(self.columns(kind))
            yield f'{"," if index else ""}"{kind}":{{"columns":{columns},"rows":['.encode()
            for first, batch in batches(self.of_kind(kind)):
                rows = ",".join([canonical_row(entry.row()) for entry in batch])
                yield f"{',' if first else ''}{rows}".encode()
            yield b"]}"
        yield b'},"schema":' + canonical_json(MANIFEST_SCHEMA)
        yield b',"spec":' + canonical_json(self.spec.to_json()) + b"}"


def batches(entries: tuple[Entry, ...]) -> Iterator[tuple[int, tuple[Entry, ...]]]:
    """Yields entries by the thousand, each batch with the position of its first entry."""
    for first in range(0, len(entries), _BATCH):
        yield first, entries[first : first + _BATCH]


_INDENT = "  "
_ROW = "\n        "  # No value holds a bracket, so the text of rows can be split.


def dumps(manifest: Manifest) -> bytes:
    """Returns the file's bytes. Equal manifests have equal bytes."""
    return b"".join(_pieces(manifest))


def loads(data: bytes) -> Manifest:
    """Returns the manifest in `data`, in any JSON formatting.

    Raises:
        ManifestError: it is not a manifest of this version, or its content does not match its id.
    """
    from aotgaudi.manifest.schema import ManifestFile  # Slow to import, and not needed for writing.

    try:
        file = ManifestFile.model_validate_json(data)
        manifest = Manifest(file.spec, file.entries.entries())
        found = manifest.id
    except ValidationError as error:
        mistake = first_mistake(error, ManifestFile)
        mend = ": run `aotgaudi build manifest` on its spec" if mistake.where == "schema" else ""
        raise ManifestError(f"{mistake}{mend}") from error
    except SpecError as error:
        raise ManifestError(f"spec.{error}") from error
    except ValueError as error:
        raise ManifestError(f"entries: {error}") from error
    if found != file.id:
        raise ManifestError(
            f"id: is {file.id}, but the content hashes to {found}"
            " (a manifest is not edited: change its spec and run `aotgaudi build manifest`)"
        )
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Reads a manifest file. Raises ManifestError, naming the file."""
    try:
        return loads(path.read_bytes())
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ManifestError as error:
        raise ManifestError(f"{path}: {error}") from error


def load_manifest_or_spec(path: Path) -> Manifest:
    """Reads a manifest file, or enumerates a spec (``.toml``). Raises SpecError or ManifestError."""
    if path.is_dir():
        raise SpecError(str(path), "is a directory", "a spec (.toml) or a manifest (.manifest.json)")
    if path.suffix == ".toml":
        return Manifest.of(load_spec(path))
    if not path.exists():
        raise ManifestError(f"{path}: there is no such file (a manifest or a spec)")
    return read_manifest(path)


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Writes a manifest file atomically. Raises StoreError."""
    write_atomic(path, _pieces(manifest))


def _pieces(manifest: Manifest) -> Iterator[bytes]:
    spec = json.dumps(_sorted_config(manifest.spec.to_json()), indent=_INDENT).replace("\n", f"\n{_INDENT}")
    head = f'  "schema": {json.dumps(MANIFEST_SCHEMA)},\n  "id": "{manifest.id}",\n  "spec": {spec}'
    yield f'{{\n{head},\n  "entries": {{'.encode()
    for index, kind in enumerate(ENTRY_KINDS):
        yield b",\n" if index else b"\n"
        yield from _table_pieces(kind, manifest)
    yield b"\n  }\n}\n"


def _table_pieces(kind: str, manifest: Manifest) -> Iterator[bytes]:
    entries, columns = manifest.of_kind(kind), json.dumps(manifest.columns(kind))
    yield f'    "{kind}": {{\n      "columns": {columns},\n      "rows": ['.encode()
    for first, batch in batches(entries):
        rows = json.dumps([entry.row() for entry in batch])[1:-1].replace("], [", f"],{_ROW}[")
        yield f"{',' if first else ''}{_ROW}{rows}".encode()
    yield b"\n      ]\n    }" if entries else b"]\n    }"


def _sorted_config(spec: dict[str, Any]) -> dict[str, Any]:
    config = json.loads(json.dumps(spec["model"]["config"], sort_keys=True))
    return {**spec, "model": {**spec["model"], "config": config}}
