"""Opens a bundle: reads each of its documents once, and decides whether the bundle may be used at all.

The index is read first, and the manifest and the receipt must be those that it names by digest. If keys are trusted, the
signature is verified before the index is parsed, and must be about this bundle. Nothing here follows a link or blocks on a
FIFO, and no object is read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from aotgaudi.bundle.capture_receipt import CaptureReceipt
from aotgaudi.bundle.format import INDEX_NAME, MANIFEST_NAME, SIGNATURE_NAME, BundleIndex, load_index
from aotgaudi.bundle.kind import RECEIPT_NAME
from aotgaudi.bundle.receipt import Receipt, SealedReceipt, load_sealed
from aotgaudi.bundle.signature import MAX_ENVELOPE_BYTES, Statement
from aotgaudi.bundle.trust import ANY_BUNDLE, TrustPolicy, check_directories, require_match
from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, ManifestError, NotWarmError, SpecError, StoreError, UntrustedError
from aotgaudi.files import MAX_DOCUMENT_BYTES, Examine, accept_any
from aotgaudi.store.cas import Fault, object_path, read_blob, read_bounded

if TYPE_CHECKING:
    from aotgaudi.bundle.launch import Launch
    from aotgaudi.graphs.program import Program
    from aotgaudi.manifest.manifest import Manifest


@dataclass(frozen=True)
class Bundle:
    """An opened bundle. `index_bytes` and `manifest_bytes` are exactly the bytes that were hashed.

    `receipt` says which artifacts answer which entries, or is the receipt of a capture. `statement` is what trusted keys
    have signed; None if no key was required. Opening a bundle does not verify its objects; `verify_bundle` does.
    """

    path: Path
    index: BundleIndex
    index_bytes: bytes
    manifest_bytes: bytes
    receipt: SealedReceipt
    statement: Statement | None = None
    policy: TrustPolicy = ANY_BUNDLE

    def require_programs(self) -> Receipt:
        """Returns the receipt if the bundle holds programs. Raises SpecError for a capture."""
        if isinstance(self.receipt, CaptureReceipt):
            raise SpecError(
                f"bundle {self.path}",
                "holds the caches of another server, no programs",
                f"aotgaudi run --bundle {self.path} -- COMMAND",
            )
        return self.receipt

    def require_capture(self) -> CaptureReceipt:
        """Returns the receipt if the bundle holds a capture. Raises SpecError for programs."""
        if isinstance(self.receipt, CaptureReceipt):
            return self.receipt
        raise SpecError(
            f"bundle {self.path}",
            "holds programs, not the caches of another server",
            f"aotgaudi serve --bundle {self.path}, or make one with: aotgaudi build capture -o DIR -- COMMAND",
        )

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest. Raises ManifestError if it is malformed, CorruptError if the receipt answers another one.

        Raises SpecError for a capture, which answers a launch.
        """
        from aotgaudi.manifest.manifest import loads as load_manifest  # Captures do not need it.

        self.require_programs()
        manifest = load_manifest(self.manifest_bytes)
        self._require_answered(f"has id {manifest.id}", manifest.id)
        return manifest

    @cached_property
    def launch(self) -> Launch:
        """The launch that a capture answers. Raises as `manifest` does, and SpecError for programs."""
        from aotgaudi.bundle.launch import load_launch  # Programs do not need it.

        self.require_capture()
        launch = load_launch(self.manifest_bytes)
        self._require_answered(f"holds launch {launch.id}", launch.id)
        return launch

    def _require_answered(self, found: str, found_id: str) -> None:
        answered = self.receipt.manifest_id
        if found_id != answered:
            raise CorruptError(f"bundle {self.path}: manifest.json {found}, the receipt answers {answered}")

    @property
    def entry_labels(self) -> dict[str, str]:
        """The entries that must run, as id -> label; for a capture, its files by path. Raises as `manifest` does."""
        if isinstance(self.receipt, CaptureReceipt):
            return {file.path: file.path for file in self.receipt.files}
        return {entry.id: str(entry) for entry in self.manifest.entries}

    def object_path(self, digest: Digest | str) -> Path:
        """Returns the path of an object, whose bytes are not verified. Raises ValueError for a malformed digest."""
        return object_path(self.path, Digest.parse(digest) if isinstance(digest, str) else digest)

    def read_object(self, digest: Digest | str) -> bytes:
        """Returns an object's bytes, which are verified as they are read. Raises NotWarmError (absent), CorruptError."""
        digest = Digest.parse(digest) if isinstance(digest, str) else digest
        path = object_path(self.path, digest)
        data = read_blob(path, digest, self.policy.examine)
        if isinstance(data, Fault):
            error = NotWarmError if data.state == "missing" else CorruptError
            raise error(f"object {digest}: {path}: {data.reason} ({self.mending_command})")
        return data

    def program(self, entry_id: str) -> Program:
        """Returns the program of an entry. Raises NotWarmError (no such program), CorruptError, ManifestError."""
        from aotgaudi.bundle.programs import load_program  # Captures do not need it.

        digest = self.program_digest(entry_id)
        return load_program(self.read_object(digest), digest)

    def program_digest(self, entry_id: str) -> Digest:
        """Returns the digest of an entry's program. Raises NotWarmError if the receipt has none."""
        digest = self.require_programs().programs.get(entry_id)
        if digest is None:
            raise NotWarmError(f"entry {entry_id} has no program in {self.path} ({self.mending_command})")
        return digest

    @property
    def mending_command(self) -> str:
        """A sentence for error messages that says how to build the whole bundle again."""
        return mending_command(self.path, is_capture=isinstance(self.receipt, CaptureReceipt))


def open_bundle(path: str | os.PathLike[str], policy: TrustPolicy = ANY_BUNDLE) -> Bundle:
    """Reads a bundle's documents, checks manifest and receipt against the index, and returns the bundle.

    Raises:
        StoreError: there is no bundle at `path`, or it cannot be read.
        ManifestError: the index or the receipt is malformed, or has another version.
        CorruptError: the manifest or the receipt is missing, or is not the one that the index names.
        UntrustedError: `policy` does not allow the bundle.
    """
    path = Path(path)
    examine = policy.examine
    index_bytes = _read_index(path, examine)
    signature = read_signature(path, examine) if policy.keys else None
    statement = policy.require_signature(signature, index_bytes, path)
    try:
        index = load_index(index_bytes)
    except ManifestError as error:
        raise ManifestError(
            f"{path / INDEX_NAME}: {error} (remove {path}, and {mending_command(path)})"
        ) from error
    if policy.owners is not None:
        check_directories(path, _directories(path, index), policy.owners)
    manifest_bytes = _read_document(path / MANIFEST_NAME, index.manifest, examine)
    receipt = load_sealed(_read_document(path / RECEIPT_NAME, index.receipt, examine))
    if receipt.manifest_id != index.manifest_id:
        raise CorruptError(
            f"bundle {path}: the receipt answers manifest {receipt.manifest_id},"
            f" the index is of {index.manifest_id}"
        )
    _require_needed(index, receipt, path)
    if statement is not None:
        require_match(statement, Statement.of(index_bytes, index, receipt), path)
    return Bundle(path, index, index_bytes, manifest_bytes, receipt, statement, policy)


def read_signature(path: Path, examine: Examine = accept_any) -> bytes | None:
    """Returns the bytes of the signature file of the bundle at `path`; None if there is none.

    Raises UntrustedError if it is not a regular file or is too large, and StoreError.
    """
    data = read_bounded(path / SIGNATURE_NAME, MAX_ENVELOPE_BYTES, examine)
    if not isinstance(data, Fault):
        return data
    if data.state == "missing":
        return None
    raise UntrustedError(f"bundle {path} is not to be trusted: {SIGNATURE_NAME}: {data.reason}")


def mending_command(bundle_path: Path, *, is_capture: bool = False) -> str:
    """Returns a sentence for error messages that says how to build a whole bundle again."""
    if is_capture:
        return f"make it again with: aotgaudi build capture -o {bundle_path} -- COMMAND"
    return f"mend it with: aotgaudi build SPEC -o {bundle_path}"


def _directories(path: Path, index: BundleIndex) -> list[Path]:
    leaves = {object_path(path, digest).parent for digest in index.objects}
    return sorted({path / "objects", path / "objects" / "sha256", *leaves} if leaves else leaves)


def _read_index(path: Path, examine: Examine) -> bytes:
    data = read_bounded(path / INDEX_NAME, _max_index_bytes(path), examine)
    if not isinstance(data, Fault):
        return data
    if data.state == "missing":
        lack = f"it has no {INDEX_NAME}" if path.exists() else "there is no such file or directory"
        raise StoreError(
            f"no bundle at {path}: {lack} (aotgaudi build, or aotgaudi build capture, makes one)"
        )
    raise CorruptError(f"{path / INDEX_NAME}: {data.reason} ({mending_command(path)})")


def _max_index_bytes(path: Path) -> int:
    """Returns how large the index may be, judged by the sizes of manifest and receipt.

    The index has 80 bytes per object. An entry takes 20 bytes of the manifest, and needs a few objects per layer. A captured
    file takes a row of the receipt, which is longer than its digest. So an index that claims millions of objects is refused
    because of its size, unless the manifest or the receipt is large enough to need them.
    """
    most = (1 << 20) + 1024 * _size_bytes(path / MANIFEST_NAME) + _size_bytes(path / RECEIPT_NAME)
    return min(MAX_DOCUMENT_BYTES, most)


def _size_bytes(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0  # Reading the file will report the error.


def _require_needed(index: BundleIndex, receipt: SealedReceipt, path: Path) -> None:
    """Raises CorruptError if the index lists more objects than the receipt can need (one object of constants a program)."""
    if isinstance(receipt, CaptureReceipt):
        if set(index.objects) != {file.digest for file in receipt.files}:
            again = mending_command(path, is_capture=True)
            raise CorruptError(
                f"bundle {path}: the index lists other objects than the receipt has files ({again})"
            )
        return
    num_files = sum(len(unit.artifact) for unit in receipt.units.values()) + len(receipt.recipes)
    most = 2 * len(receipt.programs) + num_files
    if len(index.objects) > most:
        raise CorruptError(
            f"bundle {path}: the index lists {len(index.objects)} objects, its receipt needs {most} at most"
            f" ({mending_command(path)})"
        )


def _read_document(path: Path, digest: Digest, examine: Examine) -> bytes:
    if digest.size_bytes > MAX_DOCUMENT_BYTES:
        raise ManifestError(
            f"{path} would have {digest.size_bytes} bytes, at most {MAX_DOCUMENT_BYTES} are read"
        )
    data = read_blob(path, digest, examine)
    if isinstance(data, Fault):
        raise CorruptError(f"{path}: {data.reason} ({mending_command(path.parent)})")
    return data
