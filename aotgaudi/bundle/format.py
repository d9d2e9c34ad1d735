"""The layout of a bundle, and its index.

::

    <bundle>/
      aotgaudi.bundle.json                            the index, which names the rest by digest; mode 0644
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

Versions: 1 (first). The digest of the index covers every byte of the bundle, because nothing else may be in it:
`aotgaudi verify` and `aotgaudi serve` refuse a bundle with any other file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import pydantic
from pydantic import Field

from aotgaudi.bundle.kind import RECEIPT_NAME
from aotgaudi.digest import Digest
from aotgaudi.document import Count, DigestField, Document, Value, load_document
from aotgaudi.store.cas import object_path

BUNDLE_SCHEMA: Literal["aotgaudi.bundle/1"] = "aotgaudi.bundle/1"
INDEX_NAME: Literal["aotgaudi.bundle.json"] = "aotgaudi.bundle.json"
MANIFEST_NAME = "manifest.json"
SIGNATURE_NAME = "aotgaudi.signature.json"
DOCUMENT_NAMES = (INDEX_NAME, MANIFEST_NAME, RECEIPT_NAME, SIGNATURE_NAME)

MAX_INDEX_BYTES = 32 << 20
"""The largest index that we read from others, for some 440,000 objects. In memory it takes ten times as much."""


class Counts(Value):
    """How much a bundle holds: distinct programs, units and objects, and the total size of the objects in bytes."""

    programs: Count
    units: Count
    objects: Count
    object_bytes: Count


class BundleIndex(Document):
    """The index, see the module. `objects` are digests, sorted, without repetitions."""

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


def load_index(data: bytes) -> BundleIndex:
    """Parses an index's canonical bytes. Raises ManifestError."""
    return load_document(data, BundleIndex, "bundle index")


def stray_paths(bundle: Path, objects: Iterable[Digest]) -> tuple[str, ...]:
    """Returns every file in a bundle that is neither a document nor one of `objects`, sorted.

    Paths are relative to the bundle. Links are not followed, so a link to a directory is itself stray. Raises OSError.
    """
    known = {str(bundle / name) for name in DOCUMENT_NAMES}
    known.update(str(object_path(bundle, digest)) for digest in objects)
    return tuple(sorted(os.path.relpath(path, bundle) for path in _leaves(bundle) if path not in known))


def _leaves(directory: Path) -> Iterator[str]:
    for parent, directories, files in os.walk(directory, onerror=_raise):
        yield from (os.path.join(parent, name) for name in files)
        yield from (path for name in directories if os.path.islink(path := os.path.join(parent, name)))


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
