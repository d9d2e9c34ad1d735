"""The receipt of a capture: the files from a server's caches, and the proof that it needs no others.

``receipt.json`` of a bundle that holds a capture is the canonical JSON (RFC 8785) of::

    {"schema":      "aotgaudi.capture/1",
     "manifest_id": id of the launch, which manifest.json holds,
     "target":      what the files were compiled for (backends.base.Target),
     "builder":     {component: version},
     "files":       [{"path": str, "digest": digest, "mode": "0444" | "0555", "kind": str}, ...]  by path,
     "left_out":    [{"pattern": str, "reason": str}, ...]       files in the caches that the capture leaves out
     "expected":    {"loads": {str: int}, "counters": {str: int}, "roles": {str: int}, "hooks": [str, ...],
                     "answers": [sha256, ...]}                   what a warm start must show (`Expected`)
     "factors":     {name: {factor: sha256 of its value, or the value}},   what the server hashed
     "proof":       {"counts": {name: int}, "witnesses": [str, ...]},
     "residuals":   [str, ...]                                   work that no file can save, so every start repeats it
     "repairs":     [id, ...],
     "not_exercised": [str, ...],                                kinds of request that were not sent; absent if empty
     "live_graphs": [{"kind": str, "state": "closed" | "bounded" | "open", "text": str}, ...],
                                                                 whether traffic compiles graphs of a kind; absent if empty
     "start":       {"requests": int, "tokens": int, "seconds": int, "asks_all"?: true, "why"?: str}}
                                                                 what a start is asked; absent before it was measured

Versions: 1 (first). ``live_graphs`` came later: captures that were made before, and those without shapes, have none.

A path is relative to the sandbox in which the server ran. It has at most 16 parts of printable characters in normal form C.
No part is ``.`` or ``..`` or contains a backslash. No two paths, and no two directories on them, differ only in case, and no
path leads through a file. Restored files get the sealed modes. Owners, times and links are not kept.

Measured seconds are not sealed, except for ``start``, an estimate for people (docs/adr/0020-capture.md). They
are in the store's record (docs/adr/0010-bundle-and-trust.md).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Annotated, ClassVar, Literal

import pydantic
from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt

from aotgaudi.backends.base import Target
from aotgaudi.bundle.kind import CAPTURE_SCHEMA
from aotgaudi.document import Count, DigestField, Document, Sha256, SparseValue, Value
from aotgaudi.gaudi.live_graphs import LiveGraphs


class Expected(Value):
    """What a warm start must show. All numbers are exact.

    Attributes:
        loads: Artifact (``aot:NAME``) -> how often all processes together load it until the server is ready.
        counters: The server's own counters -> their sum over all processes when it is ready. Counters of events that must
            not happen are 0.
        roles: Role -> how many of its processes must have an agent.
        hooks: The hooks that each process of those roles must have.
        answers: The sha256 (64 hex digits) of the answer to each warm-up request; empty if the answer is not compared.
    """

    loads: dict[str, PositiveInt] = Field(default_factory=dict)
    counters: dict[str, NonNegativeInt] = Field(default_factory=dict)
    roles: dict[str, PositiveInt] = Field(default_factory=dict)
    hooks: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()


FileKind = Literal["library", "pickle", "python", "json", "recipe", "cubin", "other"]
"""How a process uses a captured file. See docs/formats/launch.md."""

MAX_FILES = 200_000
"""Ten times as many as the largest known cache (DeepGEMM's, with every kernel) has on one node."""
MAX_PATH_BYTES = 1024
MAX_PART_BYTES = 255
"""NAME_MAX of Linux's file systems (limits.h)."""
MAX_DEPTH = 16
MAX_CAPTURE_BYTES = 256 << 30
"""The limit of an image layer's archive too (share/layer.py)."""


def require_captured_path(path: str) -> str:
    """Returns `path`. If a capture may not hold a file of this name, raises ValueError, which says why."""
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
    """Raises ValueError if two paths could be the same file, or one leads through another.

    Some file systems ignore case, so all names in a directory must differ after case folding.
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
    """Yields ``a``, ``a/b`` and ``a/b/c`` for ``a/b/c``. Yields nothing for an empty path."""
    return accumulate(filter(None, path.split("/")), "{}/{}".format)


CapturedPath = Annotated[str, AfterValidator(require_captured_path)]


class CapturedFile(Value):
    """One file: its path below the sandbox's root, its digest, and its mode after restoring.

    `kind` comes from the server's adapter, and is only informative.
    """

    path: CapturedPath
    digest: DigestField
    mode: Literal["0444", "0555"] = "0444"
    kind: FileKind = "other"

    @property
    def mode_bits(self) -> int:
        """`mode` as a number for ``chmod``."""
        return int(self.mode, 8)


class LeftOut(Value):
    """Files that a capture leaves out: a pattern, and the reason."""

    pattern: str
    reason: str


class Proof(Value):
    """The result of the proof: `counts` of what was compiled, generated and added, and the sources (`witnesses`)."""

    counts: dict[str, Count]
    witnesses: tuple[str, ...]


class StartCost(SparseValue):
    """What the warm-up requests of a start cost, as the proof measured it. Decides nothing but `asks_all`.

    Attributes:
        requests: HTTP requests.
        tokens: Tokens of their prompts and answers, about.
        seconds: How long they took, rounded up.
        asks_all: Whether a start sends the requests, too, that are not marked ``at_start``. Written only if true.
        why: Why it takes more than a minute. Not written if empty.
    """

    ABSENT_BY_DEFAULT: ClassVar[frozenset[str]] = frozenset({"asks_all", "why"})
    requests: Count
    tokens: Count
    seconds: Count
    asks_all: bool = False
    why: str = ""

    def __str__(self) -> str:
        """For people."""
        why = f" ({self.why})" if self.why else ""
        return f"{self.requests:,} warm-up requests, {self.tokens:,} tokens, about {self.seconds} s before it is ready{why}"


class CaptureReceipt(Document, SparseValue):
    """The receipt of a capture, see the module. `files` are sorted by path, without repetitions."""

    ABSENT_BY_DEFAULT: ClassVar[frozenset[str]] = frozenset({"not_exercised", "live_graphs", "start"})
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
    live_graphs: tuple[LiveGraphs, ...] = ()
    start: StartCost | None = None

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
        """How many bytes are written to restore the capture."""
        return sum(file.digest.size_bytes for file in self.files)
