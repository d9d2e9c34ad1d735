"""The layout of a bundle, and its index.

::

    <bundle>/
      aotgaudi.bundle.json                            the index: names the rest by digest; mode 0644
      manifest.json                                   the manifest's canonical bytes
      receipt.json                                    the receipt's canonical bytes (receipt.py)
      aotgaudi.signature.json                         optional: who vouches for the index (signature.py); mode 0644
      objects/sha256/<2 hex digits>/<64 hex digits>   programs and artifacts; mode 0444

The index is the canonical JSON (RFC 8785) of::

    {"schema":      "aotgaudi.bundle/1",
     "manifest_id": the manifest's id,
     "manifest":    digest of manifest.json,
     "receipt":     digest of receipt.json,
     "backend":     the target's backend,
     "counts":      {"programs": int, "units": int, "objects": int, "object_bytes": int},
     "objects":     [digest, ...] sorted, each once}

Versions: 1 (first). Trusting the digest of the index means trusting every byte of the bundle. Other files beside
the index are allowed; under ``objects/`` there is nothing but the objects.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import pydantic
from pydantic import Field

from aotgaudi.digest import Digest
from aotgaudi.document import DigestField, Document, Value, first_problem, load_document
from aotgaudi.errors import ManifestError
from aotgaudi.store.cas import object_path

if TYPE_CHECKING:
    from aotgaudi.bundle.receipt import Receipt
    from aotgaudi.graphs.program import Program

BUNDLE_SCHEMA: Literal["aotgaudi.bundle/1"] = "aotgaudi.bundle/1"
INDEX_NAME: Literal["aotgaudi.bundle.json"] = "aotgaudi.bundle.json"
MANIFEST_NAME = "manifest.json"
SIGNATURE_NAME = "aotgaudi.signature.json"
OBJECTS_NAME = "objects"

MAX_INDEX_BYTES = 32 << 20
"""Of an index that somebody else may have written: some 440,000 objects. It is held in memory, ten times as large."""

Count = Annotated[int, Field(ge=0, lt=1 << 53)]


class Counts(Value):
    """How much a bundle holds: distinct programs, units and objects, and the objects' sizes in bytes."""

    programs: Count
    units: Count
    objects: Count
    object_bytes: Count


class BundleIndex(Document):
    """See the module. `objects` are digests, sorted, each once."""

    schema_: Literal["aotgaudi.bundle/1"] = Field(default=BUNDLE_SCHEMA, alias="schema")
    manifest_id: str
    manifest: DigestField
    receipt: DigestField
    backend: str
    counts: Counts
    objects: tuple[DigestField, ...]

    @pydantic.model_validator(mode="after")
    def _check_objects(self) -> BundleIndex:
        texts = list(map(str, self.objects))
        if texts != sorted(set(texts)):
            raise ValueError("objects must be sorted, each once")
        return self


def dump_index(index: BundleIndex) -> bytes:
    """Returns the canonical bytes of an index."""
    return index.dumps()


def load_index(data: bytes) -> BundleIndex:
    """Parses an index's canonical bytes. Raises ManifestError."""
    return load_document(data, BundleIndex, "bundle index")


def load_program(data: bytes, digest: Digest) -> Program:
    """Parses the JSON of a program. Raises ManifestError, which names its digest."""
    from aotgaudi.graphs.program import Program  # Only here: a capture has no programs.

    try:
        return Program.model_validate_json(data)
    except pydantic.ValidationError as error:
        raise ManifestError(f"program {digest}: {first_problem(error)}") from error


def program_objects(program: Program, receipt: Receipt) -> tuple[Digest, ...]:
    """Returns the objects that running `program` needs: its constants and its units' files, each once.

    Raises ManifestError when the receipt lacks one of its units, or a digest cannot be read.
    """
    try:
        digests = [] if program.constants is None else [Digest.parse(program.constants)]
    except ValueError as error:
        raise ManifestError(f"the program's constants: {error}") from error
    for key in program.unit_keys():
        unit = receipt.units.get(key)
        if unit is None:
            raise ManifestError(f"unit {key:.12}... of the program is not in the receipt")
        digests.extend(unit.artifact.values())
    return tuple(dict.fromkeys(digests))


def stray_paths(bundle: Path, objects: Iterable[Digest]) -> tuple[str, ...]:
    """Returns every path under ``objects/`` that is neither one of `objects` nor a directory leading to one, sorted.

    Paths are relative to the bundle. Links are not followed: a link to a directory is stray itself.
    Raises OSError.
    """
    known = {str(object_path(bundle, digest)) for digest in objects}
    return tuple(
        sorted(os.path.relpath(path, bundle) for path in _leaves(bundle / OBJECTS_NAME) if path not in known)
    )


def _leaves(directory: Path) -> Iterator[str]:
    if directory.is_symlink():
        yield str(directory)
    for parent, directories, files in os.walk(directory, onerror=_raise):
        yield from (os.path.join(parent, name) for name in files)
        yield from (path for name in directories if os.path.islink(path := os.path.join(parent, name)))


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
