"""What a warm start of a guest must show: learnt in the proof run, sealed in the receipt, held against every start.

Which kind of bundle a directory says that it is. Imports little: `aotgaudi serve` asks before anything else.

The receipt of a capture: the files that a server's caches held, and how it was proved that they are all it needs.

``receipt.json`` of a bundle that holds a capture is the canonical JSON (RFC 8785) of::

    {"schema":      "aotgaudi.capture/1",
     "manifest_id": id of the launch, which manifest.json holds,
     "target":      what the files were compiled for (backends.base.Target),
     "builder":     {component: version},
     "files":       [{"path": str, "digest": digest, "mode": "0444" | "0555", "kind": str}, ...]  by path,
     "left_out":    [{"pattern": str, "reason": str}, ...]       what was there and is no part of the capture
     "expected":    {"loads": {str: int}, "counters": {str: int}, "roles": {str: int}, "hooks": [str, ...],
                     "answers": [sha256, ...]}                   what a warm start shows (guests/expected.py)
     "factors":     {name: {factor: sha256 of its value, or the value}},   what the server hashed
     "proof":       {"counts": {name: int}, "witnesses": [str, ...]},
     "residuals":   [str, ...]                                   what no file can hold, and every start does again
     "repairs":     [id, ...]}

Versions: 1 (first).

A path is relative to the place in which the server ran: at most 16 parts of printable characters in normal form C, none of
which is ``.`` or ``..`` or has a backslash. No two paths, and no two directories on their way, differ in case alone, and no
path leads through a file. Modes are those that the files are given again; owners, times and links are not kept.

What was measured (seconds) is not sealed but in the store's record (docs/adr/0002-receipt-and-bundle.md).
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Literal

import pydantic
from pydantic import AfterValidator, Field, JsonValue, NonNegativeInt, PositiveInt, StringConstraints

from aotgaudi.backends.base import Target
from aotgaudi.bundle.kind import CAPTURE_SCHEMA
from aotgaudi.document import DigestField, Document, Value


class Expected(Value):
    """What a warm start shows. Every number is exact.

    Attributes:
        loads: Artifact (``aot:NAME``) -> how often it is loaded, over all processes, until the guest is ready.
        counters: The guest's own counters -> their sum over all processes when it is ready. What must not happen is listed
            with 0.
        roles: Role -> how many processes of it must have a witness.
        hooks: What must be hooked in each process of those roles.
        answers: The sha256 (64 hex digits) of each answer to the exercise, in its order; empty where it is not compared.
    """

    loads: dict[str, PositiveInt] = Field(default_factory=dict)
    counters: dict[str, NonNegativeInt] = Field(default_factory=dict)
    roles: dict[str, PositiveInt] = Field(default_factory=dict)
    hooks: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()


def learnt(
    events: Iterable[Mapping[str, JsonValue]],
    *,
    roles: Mapping[str, int],
    hooks: tuple[str, ...],
    counted: Sequence[str],
    zeros: Sequence[str],
) -> Expected:
    """Returns what the events of a proof run teach.

    Args:
        events: of all processes; of one process in their order.
        roles: what must have a witness.
        hooks: what must be hooked.
        counted: the guest's counters that must be what they were; those that stayed at 0 are left out.
        zeros: those that must be 0.
    """
    loads: Counter[str] = Counter()
    last: dict[tuple[JsonValue, str], int] = {}
    for event in events:
        if event.get("e") == "loaded":
            loads[f"{event.get('what')}:{event.get('name')}"] += 1
        values = event.get("values")
        if event.get("e") == "counters" and isinstance(values, dict):
            last.update({(event.get("pid"), n): v for n, v in values.items() if isinstance(v, int)})
    sums: Counter[str] = Counter()
    for (_, name), value in last.items():
        if name in counted:
            sums[name] += value
    counters = {**dict.fromkeys(zeros, 0), **{name: value for name, value in sums.items() if value}}
    return Expected(loads=dict(loads), counters=counters, roles=dict(roles), hooks=hooks)


FileKind = Literal["library", "pickle", "python", "json", "recipe", "cubin", "other"]
"""What a captured file is to the process that reads it; see docs/formats/launch.md."""

MAX_FILES = 200_000
"""Ten times what the largest known cache (DeepGEMM's, with every kernel) has on one node."""
MAX_PATH_BYTES = 1024
MAX_PART_BYTES = 255
"""NAME_MAX of Linux's file systems (limits.h)."""
MAX_DEPTH = 16
MAX_CAPTURE_BYTES = 256 << 30
"""As the archive of an image's layer (oci/layer.py)."""

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}\z")]
Count = Annotated[int, Field(ge=0, lt=1 << 53)]


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
    """Raises ValueError where two paths could be one file, or one leads through another.

    That depends on the file system: those that ignore case fold it, so all names of a directory must differ when folded.
    """
    spelt: dict[str, str] = {}
    files: set[str] = set()
    for path in paths:
        if path in files:
            raise ValueError(f"is there twice: {path!r:.200}")
        files.add(path)
        for name in _ancestry(path):
            other = spelt.setdefault(unicodedata.normalize("NFC", name.casefold()), name)
            if other != name:
                raise ValueError(f"{name!r:.200} and {other!r:.200} differ in case alone")
    for path in files:
        through = next((name for name in _ancestry(path) if name != path and name in files), None)
        if through is not None:
            raise ValueError(f"{path!r:.200} leads through the file {through!r:.200}")


def _ancestry(path: str) -> Iterator[str]:
    """``a``, ``a/b``, ``a/b/c``."""
    return accumulate(path.split("/"), "{}/{}".format)


CapturedPath = Annotated[str, AfterValidator(require_captured_path)]


class CapturedFile(Value):
    """One file: where it was below the place's root, its bytes by digest, and the mode that it is given again.

    `kind` is what the server's adapter says it is; it decides nothing.
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
    """Files that a capture leaves out: a pattern, and why they are no part of it."""

    pattern: str
    reason: str


class Proof(Value):
    """What the proof run showed: `counts` of what was compiled, generated and added; which `witnesses` were there."""

    counts: dict[str, Count]
    witnesses: tuple[str, ...]


class CaptureReceipt(Document):
    """See the module. `files` are sorted by path, each once."""

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
        """How much restoring writes."""
        return sum(file.digest.size_bytes for file in self.files)
