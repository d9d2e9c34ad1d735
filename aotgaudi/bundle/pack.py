"""Seals a bundle directory from a manifest (or a launch), its receipt and the store's objects.

The same inputs give the same bytes in every file, on every machine and at any time. The bundle is written next to its
destination NAME and renamed into place, so no reader ever sees an unfinished bundle::

    .NAME.tmp-PID    a bundle that a process is assembling, or the old bundle that it has exchanged and now removes
    .NAME.old-PID    the old bundle, moved aside on a system that cannot exchange two names

A process locks (flock) its directories, and the lock ends with the process. The next writer to NAME removes the leftovers of
dead processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aotgaudi.bundle.capture_receipt import CaptureReceipt
from aotgaudi.bundle.format import (
    INDEX_NAME,
    MANIFEST_NAME,
    RECEIPT_NAME,
    SIGNATURE_NAME,
    BundleIndex,
    Counts,
    load_index,
    stray_paths,
)
from aotgaudi.bundle.programs import load_program, program_objects
from aotgaudi.bundle.receipt import SealedReceipt
from aotgaudi.bundle.signing import Signing
from aotgaudi.digest import Digest
from aotgaudi.errors import ManifestError, StoreError, store_error
from aotgaudi.files import exchange_names, fsync_dir, try_lock_directory
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
    try:
        with building_directory(out) as building:
            for digest in digests:
                _copy_object(building, digest, objects)
            for name, data in documents.items():
                (building / name).write_bytes(data)
                (building / name).chmod(_DOCUMENT_MODE)
            settle(building)
            exchange_directory(building, out)
    except OSError as error:
        raise store_error("write the bundle", out, error, needed_bytes=needed_bytes) from error


def _copy_object(bundle: Path, digest: Digest, objects: ObjectStore) -> None:
    path = object_path(bundle, digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb", buffering=0) as file:
        objects.copy_to(digest, file.fileno())
        os.fchmod(file.fileno(), 0o444)


_DIRECTORY_MODE = 0o755
_NUM_THREADS = 8


def refuse_foreign(out: Path) -> None:
    """Raises StoreError unless `out` is a bundle, an empty directory or missing, since nothing else may be overwritten."""
    refusal = f"cannot seal a bundle at {out}: it is"
    if not holds_something(out, refusal):
        return
    try:
        load_index((out / INDEX_NAME).read_bytes())
    except FileNotFoundError as error:
        raise StoreError(
            f"{refusal} neither a bundle nor empty (choose another path, or empty it)"
        ) from error
    except ManifestError as error:
        remedy = "remove it, or choose another path"
        raise StoreError(f"{refusal} not a bundle that this aotgaudi can read: {error} ({remedy})") from error
    except OSError as error:
        raise store_error("look at", out, error) from error


def holds_something(out: Path, refusal: str) -> bool:
    """Returns whether `out` is a directory that is not empty. Raises StoreError, with `refusal`, if it is something else."""
    try:
        if out.is_symlink() or (out.exists() and not out.is_dir()):
            raise StoreError(f"{refusal} not a directory (choose another path)")
        return out.exists() and any(out.iterdir())
    except OSError as error:
        raise store_error("look at", out, error) from error


@contextlib.contextmanager
def building_directory(out: Path) -> Iterator[Path]:
    """Yields a new, locked directory next to `out`, and removes it at the end unless `exchange_directory` moved it.

    Raises OSError.
    """
    sweep_abandoned(out)
    building = _private(out, "tmp")
    shutil.rmtree(building, ignore_errors=True)  # Of a dead process that had our id.
    building.mkdir(mode=_DIRECTORY_MODE, parents=True)
    try:
        with try_lock_directory(building):
            yield building
    finally:
        shutil.rmtree(building, ignore_errors=True)


def exchange_directory(building: Path, out: Path) -> None:
    """Renames `building`, made by `building_directory`, to `out`, in exchange for a directory that is there and not empty.

    There is a bundle at `out` at every moment, except between two renames on a system without RENAME_EXCHANGE. A reader that
    has the old directory open keeps it. On an error, raises OSError and leaves the old directory at `out`.
    """
    if not out.exists() or not any(out.iterdir()):
        os.rename(building, out)
    elif not exchange_names(building, out):
        _exchange_in_steps(building, out)
    fsync_dir(out.parent)
    shutil.rmtree(building, ignore_errors=True)


def sweep_abandoned(out: Path) -> None:
    """Removes the leftovers of dead processes next to `out`. Restores an old bundle if its process died between two renames.

    Never fails. If something cannot be removed now, the next writer tries again.
    """
    name = re.compile(rf"\.?{re.escape(out.name)}\.(tmp|old)-([0-9]{{1,10}})")
    with contextlib.suppress(OSError):
        for path in sorted(out.parent.iterdir()):
            found = name.fullmatch(path.name)
            if found is None or path.is_symlink() or not _is_abandoned(path, int(found[2])):
                continue
            if found[1] == "old" and not out.exists():
                os.rename(path, out)
            else:
                shutil.rmtree(path, ignore_errors=True)


def _private(out: Path, kind: str) -> Path:
    return out.with_name(f".{out.name}.{kind}-{os.getpid()}")


def _exchange_in_steps(building: Path, out: Path) -> None:
    retired = _private(out, "old")
    shutil.rmtree(retired, ignore_errors=True)
    os.rename(out, retired)
    try:
        os.rename(building, out)
    except OSError:
        os.rename(retired, out)
        raise
    shutil.rmtree(retired, ignore_errors=True)


def _is_abandoned(path: Path, process_id: int) -> bool:
    """Returns whether the process is gone and no process on any machine holds the directory's lock. False without locks.

    If the id is our own (1, in a container), only the lock decides.
    """
    if process_id != os.getpid() and Path("/proc", str(process_id)).exists():
        return False
    with try_lock_directory(path) as is_free:
        return is_free is True


def settle(root: Path) -> None:
    """Syncs every file, then every name. Sets the mode of directories, and removes empty ones. Raises OSError."""
    paths = [Path(parent, name) for parent, _, names in os.walk(root) for name in names]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:  # In parallel, since the device syncs several together.
        for _ in pool.map(_sync_file, paths):
            pass
        directories = [Path(parent) for parent, _, _ in os.walk(root, topdown=False)]
        for _ in pool.map(_settle_directory, filter(_is_in_use, directories)):
            pass


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _settle_directory(path: Path) -> None:
    os.chmod(path, _DIRECTORY_MODE)
    fsync_dir(path)


def _is_in_use(path: Path) -> bool:
    try:
        os.rmdir(path)
    except OSError:  # It is not empty.
        return True
    return False
