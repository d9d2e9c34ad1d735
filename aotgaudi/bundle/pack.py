"""Seals a bundle directory from a manifest (or a launch), its receipt and the store's objects.

The same inputs give the same bytes in every file, on every machine and at any time. The bundle is written next to its
destination and renamed into place, so no reader ever sees an unfinished bundle.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from aotgaudi.bundle.capture_receipt import CaptureReceipt
from aotgaudi.bundle.format import INDEX_NAME, MANIFEST_NAME, SIGNATURE_NAME, BundleIndex, Counts, stray_paths
from aotgaudi.bundle.kind import RECEIPT_NAME
from aotgaudi.bundle.programs import load_program, program_objects
from aotgaudi.bundle.receipt import SealedReceipt
from aotgaudi.bundle.signing import Signing
from aotgaudi.bundle.staging import refuse_foreign, replacing
from aotgaudi.digest import Digest
from aotgaudi.errors import ManifestError
from aotgaudi.store.cas import ObjectStore, find_fault, object_path

_DOCUMENT_MODE = 0o644


def pack_bundle(
    manifest_bytes: bytes,
    manifest_id: str,
    receipt: SealedReceipt,
    objects: ObjectStore,
    out: Path,
    signing: Signing | None = None,
) -> BundleIndex:
    """Seals a bundle at `out`, signed if `signing` is given, and returns its index.

    For a capture, `manifest_bytes` and `manifest_id` are the launch's. If `out` is an intact bundle with the same contents,
    it is left alone. Another bundle, or a damaged one, is replaced. Anything else except an empty directory is refused.
    Objects are copied, not linked, and verified on the way, so that damage cannot spread from the store to a bundle or back.

    Raises:
        ManifestError: The receipt answers another manifest, or lacks a unit that a program calls.
        CorruptError: An object of the store does not match its digest.
        StoreError: An object is absent, `out` is neither a bundle nor empty, or it cannot be written.
    """
    if receipt.manifest_id != manifest_id:
        raise ManifestError(
            f"the receipt answers manifest {receipt.manifest_id}, not {manifest_id}: build again"
        )
    digests = _needed_objects(receipt, objects)
    receipt_bytes = receipt.dumps()
    index = _index(manifest_bytes, receipt, receipt_bytes, digests)
    documents = {
        INDEX_NAME: index.dumps(),
        MANIFEST_NAME: manifest_bytes,
        RECEIPT_NAME: receipt_bytes,
    }
    if signing is not None:
        documents[SIGNATURE_NAME] = signing.sign(documents[INDEX_NAME], index, receipt)
    out = Path(os.path.abspath(out))
    refuse_foreign(out)
    if not _is_sealed(out, documents, digests):
        _seal(out, documents, digests, objects)
    return index


def _needed_objects(receipt: SealedReceipt, objects: ObjectStore) -> tuple[Digest, ...]:
    """Returns all objects of the bundle, in the order of the index."""
    if isinstance(receipt, CaptureReceipt):
        return tuple(sorted({file.digest for file in receipt.files}, key=str))
    digests = {digest for unit in receipt.units.values() for digest in unit.artifact.values()}
    for digest in set(receipt.programs.values()):
        program = load_program(objects.read(digest), digest)
        digests |= {digest, *program_objects(program, receipt)}
    return tuple(sorted(digests, key=str))


def _index(
    manifest_bytes: bytes, receipt: SealedReceipt, receipt_bytes: bytes, digests: tuple[Digest, ...]
) -> BundleIndex:
    return BundleIndex(
        manifest_id=receipt.manifest_id,
        manifest=Digest.of(manifest_bytes),
        receipt=Digest.of(receipt_bytes),
        backend=receipt.target.backend,
        counts=Counts(
            programs=0 if isinstance(receipt, CaptureReceipt) else len(set(receipt.programs.values())),
            units=len(receipt.files if isinstance(receipt, CaptureReceipt) else receipt.units),
            objects=len(digests),
            object_bytes=sum(digest.size_bytes for digest in digests),
        ),
        objects=digests,
    )


def _is_sealed(out: Path, documents: Mapping[str, bytes], digests: Iterable[Digest]) -> bool:
    """Returns whether `out` already is the bundle that would be written, complete and intact."""
    with contextlib.suppress(OSError):
        same = all((out / name).read_bytes() == data for name, data in documents.items())
        return (
            same
            and all(find_fault(object_path(out, digest), digest) is None for digest in digests)
            and not stray_paths(out, digests)
        )
    return False


def _seal(
    out: Path, documents: Mapping[str, bytes], digests: tuple[Digest, ...], objects: ObjectStore
) -> None:
    needed_bytes = sum(digest.size_bytes for digest in digests) + sum(map(len, documents.values()))
    with replacing(out, "the bundle", needed_bytes=needed_bytes) as building:
        for digest in digests:
            _copy_object(building, digest, objects)
        for name, data in documents.items():
            (building / name).write_bytes(data)
            (building / name).chmod(_DOCUMENT_MODE)


def _copy_object(bundle: Path, digest: Digest, objects: ObjectStore) -> None:
    path = object_path(bundle, digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb", buffering=0) as file:
        objects.copy_to(digest, file.fileno())
        os.fchmod(file.fileno(), 0o444)
