"""Opening a bundle, and proving that every byte in it is what was sealed.

Opening reads the three documents: the index, and the manifest and receipt that it names by digest. Verifying
re-hashes every object, each file once, in threads (hashing releases the interpreter lock). Neither ever
follows a link, blocks on a FIFO, or loads an artifact.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from aotgaudi.bundle.document import MAX_DOCUMENT_BYTES
from aotgaudi.bundle.format import (
    INDEX_NAME,
    MANIFEST_NAME,
    RECEIPT_NAME,
    BundleIndex,
    load_index,
    load_program,
    program_objects,
    stray_paths,
)
from aotgaudi.bundle.receipt import Receipt
from aotgaudi.bundle.receipt import loads as load_receipt
from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, ManifestError, NotWarmError, StoreError
from aotgaudi.graphs.program import Program
from aotgaudi.store.blobs import Fault, find_fault, read_blob
from aotgaudi.store.cas import object_path
from aotgaudi.store.faults import store_error

_MAX_THREADS = 8
_MAX_ROWS = 10


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle. `index_bytes` and `manifest_bytes` are the very bytes that were hashed.

    `index_bytes` is what a signature is over. Objects are not verified by opening: see `verify_bundle`.
    """

    path: Path
    index: BundleIndex
    index_bytes: bytes
    manifest_bytes: bytes
    receipt: Receipt

    def object_path(self, digest: Digest | str) -> Path:
        """Returns where an object lies; its bytes are not verified. Raises ValueError for no digest."""
        return object_path(self.path, Digest.parse(digest) if isinstance(digest, str) else digest)

    def read_object(self, digest: Digest | str) -> bytes:
        """Returns an object's bytes, verified as read. Raises NotWarmError (absent), CorruptError."""
        digest = Digest.parse(digest) if isinstance(digest, str) else digest
        path = object_path(self.path, digest)
        data = read_blob(path, digest)
        if isinstance(data, Fault):
            error = NotWarmError if data.state == "missing" else CorruptError
            raise error(f"object {digest}: {path}: {data.reason} ({mending_command(self.path)})")
        return data

    def program(self, entry_id: str) -> Program:
        """Returns how the entry runs. Raises NotWarmError (no such program), CorruptError, ManifestError."""
        text = self.receipt.programs.get(entry_id)
        if text is None:
            raise NotWarmError(
                f"entry {entry_id} has no program in {self.path} ({mending_command(self.path)})"
            )
        digest = Digest.parse(text)
        return load_program(self.read_object(digest), digest)


@dataclass(frozen=True, slots=True)
class MissingEntry:
    """An entry (its label) that cannot run because something was never built, or has been removed."""

    entry: str
    reason: str


@dataclass(frozen=True, slots=True)
class CorruptObject:
    """An object that is not what its digest says, and the labels of the entries that need it."""

    path: str
    reason: str
    entries: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What verifying found. `extra` are paths under ``objects/`` that the index does not list."""

    num_entries: int
    num_objects: int
    object_bytes: int
    missing: tuple[MissingEntry, ...]
    corrupt: tuple[CorruptObject, ...]
    extra: tuple[str, ...]

    @property
    def is_intact(self) -> bool:
        """Whether every entry can run, and nothing else is there."""
        return not (self.missing or self.corrupt or self.extra)

    def raise_if_bad(self, bundle_path: Path) -> None:
        """Raises CorruptError when bytes differ or are unaccounted for, else NotWarmError when entries miss.

        The message is a plain table of the first rows (entry, state, reason) and the command that mends it.
        """
        if self.is_intact:
            return
        counts = (f"{len(self.corrupt)} corrupt", f"{len(self.missing)} missing", f"{len(self.extra)} extra")
        rows = self._rows()
        message = "\n".join(
            [
                f"bundle {bundle_path} cannot be served: {', '.join(counts)} ({self.num_entries} entries)",
                *_table([("entry", "state", "reason"), *rows[:_MAX_ROWS]]),
                *([f"... and {len(rows) - _MAX_ROWS} more"] if len(rows) > _MAX_ROWS else []),
                mending_command(bundle_path),
            ]
        )
        raise CorruptError(message) if self.corrupt or self.extra else NotWarmError(message)

    def _rows(self) -> list[tuple[str, str, str]]:
        return [
            *((_abridged(bad.entries), "corrupt", f"{bad.path}: {bad.reason}") for bad in self.corrupt),
            *(("-", "extra", f"{path}: not in the index") for path in self.extra),
            *((gone.entry, "missing", gone.reason) for gone in self.missing),
        ]


def mending_command(bundle_path: Path) -> str:
    """Returns the sentence that says how to make a whole bundle again."""
    return (
        "mend it with: aotgaudi build SPEC, or:"
        f" aotgaudi build cache MANIFEST && aotgaudi build bundle MANIFEST -o {bundle_path}"
    )


def open_bundle(path: Path) -> Bundle:
    """Reads a bundle's documents and checks the manifest and the receipt against the index.

    Raises:
        StoreError: there is no bundle at `path`, or it cannot be read.
        ManifestError: the index (or the receipt) is malformed, or of another version.
        CorruptError: the manifest or the receipt is missing, or is not the one that the index names.
    """
    index_bytes = _read_index(path)
    index = load_index(index_bytes)
    manifest_bytes = _read_document(path / MANIFEST_NAME, Digest.parse(index.manifest))
    receipt = load_receipt(_read_document(path / RECEIPT_NAME, Digest.parse(index.receipt)))
    if receipt.manifest_id != index.manifest_id:
        raise CorruptError(
            f"bundle {path}: the receipt answers manifest {receipt.manifest_id},"
            f" the index is of {index.manifest_id}"
        )
    return Bundle(path, index, index_bytes, manifest_bytes, receipt)


def verify_bundle(bundle: Bundle, entries: Mapping[str, str]) -> Report:
    """Re-hashes every object and says which of `entries` (id -> label) can run, and why the others cannot.

    Reads each object's file once. Raises StoreError where the system refuses to let us look.
    """
    programs = {text: _read_program(bundle, text) for text in sorted(set(bundle.receipt.programs.values()))}
    needs = {text: read for text, read in programs.items() if not isinstance(read, Fault)}
    faults = {text: read for text, read in programs.items() if isinstance(read, Fault)}
    others = {*bundle.index.objects, *(text for texts in needs.values() for text in texts)} - programs.keys()
    faults |= _find_faults(bundle, sorted(others))
    users = _users(bundle.receipt, entries, needs)
    return Report(
        num_entries=len(entries),
        num_objects=len(bundle.index.objects),
        object_bytes=bundle.index.counts.object_bytes,
        missing=_missing(bundle, entries, faults, users),
        corrupt=_corrupt(bundle, faults, users),
        extra=_extra(bundle),
    )


def _read_program(bundle: Bundle, text: str) -> tuple[str, ...] | Fault:
    """The objects that one program needs, or what is wrong with it."""
    digest = Digest.parse(text)
    data = read_blob(object_path(bundle.path, digest), digest)
    if isinstance(data, Fault):
        return data
    try:
        program = load_program(data, digest)
    except ManifestError as error:
        return Fault("corrupt", str(error))
    try:
        return tuple(map(str, program_objects(program, bundle.receipt)))
    except ManifestError as error:
        return Fault("missing", str(error))


def _find_faults(bundle: Bundle, texts: Iterable[str]) -> dict[str, Fault]:
    def look(text: str) -> tuple[str, Fault | None]:
        digest = Digest.parse(text)
        return text, find_fault(object_path(bundle.path, digest), digest)

    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        return {text: fault for text, fault in pool.map(look, texts) if fault is not None}


def _users(
    receipt: Receipt, entries: Mapping[str, str], needs: Mapping[str, Iterable[str]]
) -> Mapping[str, tuple[str, ...]]:
    """The labels of the entries that need each object, in the order of `entries`."""
    users: defaultdict[str, list[str]] = defaultdict(list)
    for entry_id, label in entries.items():
        program = receipt.programs.get(entry_id)
        if program is not None:
            for text in dict.fromkeys((program, *needs.get(program, ()))):
                users[text].append(label)
    return {text: tuple(labels) for text, labels in users.items()}


def _missing(
    bundle: Bundle,
    entries: Mapping[str, str],
    faults: Mapping[str, Fault],
    users: Mapping[str, tuple[str, ...]],
) -> tuple[MissingEntry, ...]:
    """One row an entry, in the order of `entries`; then a row for each absent object that no entry needs."""
    absent = {text: fault for text, fault in faults.items() if fault.state == "missing"}
    reasons: dict[str, str] = {}
    for text, fault in absent.items():
        for label in users.get(text, ("-",)):
            reasons.setdefault(label, f"{_relative(bundle, text)}: {fault.reason}")
    for entry_id, label in entries.items():
        if entry_id not in bundle.receipt.programs:
            reasons[label] = "no program in the receipt"
    order = (*dict.fromkeys(entries.values()), "-")
    return tuple(MissingEntry(label, reasons[label]) for label in order if label in reasons)


def _corrupt(
    bundle: Bundle, faults: Mapping[str, Fault], users: Mapping[str, tuple[str, ...]]
) -> tuple[CorruptObject, ...]:
    return tuple(
        CorruptObject(_relative(bundle, text), fault.reason, users.get(text, ()))
        for text, fault in sorted(faults.items())
        if fault.state == "corrupt"
    )


def _extra(bundle: Bundle) -> tuple[str, ...]:
    try:
        return stray_paths(bundle.path, map(Digest.parse, bundle.index.objects))
    except OSError as error:
        raise store_error("list", bundle.path, error) from error


def _relative(bundle: Bundle, text: str) -> str:
    return str(object_path(bundle.path, Digest.parse(text)).relative_to(bundle.path))


def _read_index(path: Path) -> bytes:
    index = path / INDEX_NAME
    try:
        with index.open("rb") as file:
            data = file.read(MAX_DOCUMENT_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreError(f"no bundle at {path}: it has no {INDEX_NAME} ({mending_command(path)})") from error
    except OSError as error:
        raise store_error("read", index, error) from error
    if len(data) > MAX_DOCUMENT_BYTES:
        raise ManifestError(f"{index} is larger than {MAX_DOCUMENT_BYTES} bytes: not a bundle index")
    return data


def _read_document(path: Path, digest: Digest) -> bytes:
    if digest.size_bytes > MAX_DOCUMENT_BYTES:
        raise ManifestError(
            f"{path} would have {digest.size_bytes} bytes, at most {MAX_DOCUMENT_BYTES} are read"
        )
    data = read_blob(path, digest)
    if isinstance(data, Fault):
        raise CorruptError(f"{path}: {data.reason} ({mending_command(path.parent)})")
    return data


def _abridged(labels: tuple[str, ...]) -> str:
    if not labels:
        return "-"
    return labels[0] + (f" and {len(labels) - 1} more" if len(labels) > 1 else "")


def _table(rows: list[tuple[str, str, str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return [f"{entry:{widths[0]}}  {state:{widths[1]}}  {reason}" for entry, state, reason in rows]
