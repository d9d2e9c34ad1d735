"""The receipt of a capture: the files that a server's caches held, and how it was proved that they are all it needs.

``receipt.json`` of a bundle that holds a capture is the canonical JSON (RFC 8785) of::

    {"schema":      "aotgaudi.capture/1",
     "manifest_id": id of the launch, which manifest.json holds,
     "target":      what the files were compiled for (backends.base.Target),
     "builder":     {component: version},
     "files":       [{"path": str, "digest": digest, "mode": "0444" | "0555", "kind": str}, ...]  by path,
     "left_out":    [{"pattern": str, "reason": str}, ...]       what was there and is no part of the capture
     "expected":    {"loads": {str: int}, "counters": {str: int}, "roles": {str: int}, "hooks": [str, ...],
                     "answers": [sha256, ...]}                   what a warm start shows (`Expected`)
     "factors":     {name: {factor: sha256 of its value, or the value}},   what the server hashed
     "proof":       {"counts": {name: int}, "witnesses": [str, ...]},
     "residuals":   [str, ...]                                   what no file can hold, and every start does again
     "repairs":     [id, ...],
     "not_exercised": [str, ...]}                                what was not asked; absent if there is nothing

Versions: 1 (first).

A path is relative to the sandbox in which the server ran. It has at most 16 parts of printable characters in normal form C,
and no part is ``.`` or ``..`` or has a backslash. No two paths, and no two directories on them, differ only in case, and no
path leads through a file. Restored files get the sealed modes; owners, times and links are not kept.

Measured seconds are not sealed. They are in the store's record (docs/adr/0002-receipt-and-bundle.md).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Annotated, Any, Literal

import pydantic
from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt

from aotgaudi.backends.base import Target
from aotgaudi.bundle.kind import CAPTURE_SCHEMA
from aotgaudi.document import Count, DigestField, Document, Sha256, Value


class Expected(Value):
    """What a warm start shows. Every number is exact.

    Attributes:
        loads: Artifact (``aot:NAME``) -> how often all processes load it until the server is ready.
        counters: The server's own counters -> their sum over all processes when it is ready. Counters of what must not
            happen are 0.
        roles: Role -> how many of its processes must have an agent.
        hooks: What must be hooked in each process of those roles.
        answers: The sha256 (64 hex digits) of the answer to each warm-up request; empty if it is not compared.
    """

    loads: dict[str, PositiveInt] = Field(default_factory=dict)
    counters: dict[str, NonNegativeInt] = Field(default_factory=dict)
    roles: dict[str, PositiveInt] = Field(default_factory=dict)
    hooks: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()


FileKind = Literal["library", "pickle", "python", "json", "recipe", "cubin", "other"]
"""How a process uses a captured file; see docs/formats/launch.md."""

MAX_FILES = 200_000
"""Ten times what the largest known cache (DeepGEMM's, with every kernel) has on one node."""
MAX_PATH_BYTES = 1024
MAX_PART_BYTES = 255
"""NAME_MAX of Linux's file systems (limits.h)."""
MAX_DEPTH = 16
MAX_CAPTURE_BYTES = 256 << 30
"""As the archive of an image's layer (share/layer.py)."""


def require_captured_path(path: str) -> str:
    """Returns `path`. Raises ValueError, which says why, unless a capture may hold a file of this name."""
    parts = path.split("/")
    if path.startswith("/"):
        raise ValueError(f"is an absolute path: {path!r:.200}")
    if not {"", ".", ".."}.isdisjoint(parts):
        raise ValueError(f"has a part that is empty, . or ..: {path!r:.200}")
    if not path.isprintable() or "\\" in path:
        raise ValueError(f"has a character that is not printable, or a backslash: {path!r:.200}")
    if not unicodedata.is_normalized("NFC", path):
        raise ValueError(f"is not in Unicode's normal form C: {path!r:.200}")
    if len(parts) > MAX_DEPTH or len(path.encode()) > MAX_PATH_BYTES:
        raise ValueError(f"has more than {MAX_DEPTH} parts or {MAX_PATH_BYTES} bytes: {path!r:.200}")
    if any(len(part.encode()) > MAX_PART_BYTES for part in parts):
        raise ValueError(f"has a part of more than {MAX_PART_BYTES} bytes: {path!r:.200}")
    return path


def require_distinct(paths: Iterable[str]) -> None:
    """Raises ValueError if two paths could be one file, or one leads through another.

    Some file systems ignore case, so all names in a directory must differ when their case is folded.
    """
    spelt: dict[str, str] = {}
    files: set[str] = set()
    for path in paths:
        if path in files:
            raise ValueError(f"is there twice: {path!r:.200}")
        files.add(path)
        for name in ancestry(path):
            other = spelt.setdefault(unicodedata.normalize("NFC", name.casefold()), name)
            if other != name:
                raise ValueError(f"{name!r:.200} and {other!r:.200} differ in case alone")
    for path in files:
        through = next((name for name in ancestry(path) if name != path and name in files), None)
        if through is not None:
            raise ValueError(f"{path!r:.200} leads through the file {through!r:.200}")


def ancestry(path: str) -> Iterator[str]:
    """Yields ``a``, ``a/b`` and ``a/b/c`` for ``a/b/c``; nothing for an empty path."""
    return accumulate(filter(None, path.split("/")), "{}/{}".format)


CapturedPath = Annotated[str, AfterValidator(require_captured_path)]


class CapturedFile(Value):
    """One file: its path below the sandbox's root, its digest, and the mode that it gets when it is restored.

    `kind` comes from the server's adapter, and decides nothing.
    """

    path: CapturedPath
    digest: DigestField
    mode: Literal["0444", "0555"] = "0444"
    kind: FileKind = "other"

    @property
    def mode_bits(self) -> int:
        """`mode` as ``chmod`` takes it."""
        return int(self.mode, 8)


class LeftOut(Value):
    """Files that a capture leaves out: a pattern, and the reason."""

    pattern: str
    reason: str


class Proof(Value):
    """What the proof showed: `counts` of what was compiled, generated and added, and which `witnesses` there were."""

    counts: dict[str, Count]
    witnesses: tuple[str, ...]


class CaptureReceipt(Document):
    """See the module's docstring. `files` are sorted by path, each once."""

    schema_: Literal["aotgaudi.capture/1"] = Field(default=CAPTURE_SCHEMA, alias="schema")
    manifest_id: Sha256
    target: Target
    builder: dict[str, str]
    files: Annotated[tuple[CapturedFile, ...], Field(min_length=1, max_length=MAX_FILES)]
    left_out: tuple[LeftOut, ...] = ()
    expected: Expected
    factors: dict[str, dict[str, str]] = Field(default_factory=dict)
    proof: Proof
    residuals: tuple[str, ...] = ()
    repairs: tuple[str, ...] = ()
    not_exercised: tuple[str, ...] = ()

    @pydantic.model_serializer(mode="wrap")
    def _written(self, write: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = write(self)
        if not self.not_exercised:
            del document["not_exercised"]
        return document

    @pydantic.model_validator(mode="after")
    def _check_files(self) -> CaptureReceipt:
        paths = [file.path for file in self.files]
        require_distinct(paths)
        if paths != sorted(paths):
            raise ValueError("files must be sorted by path")
        if self.num_bytes > MAX_CAPTURE_BYTES:
            raise ValueError(f"files have {self.num_bytes} bytes, at most {MAX_CAPTURE_BYTES} are restored")
        return self

    @property
    def num_bytes(self) -> int:
        """How many bytes restoring writes."""
        return sum(file.digest.size_bytes for file in self.files)
