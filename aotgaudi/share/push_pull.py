"""Pushes a bundle to a remote, and pulls it from one or several: documents first, then every object by its digest.

Nothing of a bundle is trusted before it is verified. The pointer names the index by digest, and the index names everything
else. If a signature is required, it is verified before anything except the index is requested. So the sizes of all objects
are signed. They are compared with the free space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aotgaudi.bundle.bundle import Bundle, open_bundle, read_signature
from aotgaudi.bundle.format import (
    INDEX_NAME,
    MANIFEST_NAME,
    MAX_INDEX_BYTES,
    OBJECTS_NAME,
    SIGNATURE_NAME,
    BundleIndex,
    load_index,
)
from aotgaudi.bundle.kind import RECEIPT_NAME
from aotgaudi.bundle.signature import MAX_ENVELOPE_BYTES
from aotgaudi.bundle.staging import PARTIAL_NAME, publish, staging_directory
from aotgaudi.bundle.trust import ANY_BUNDLE, TrustPolicy
from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, MissingObjectError, RemoteError
from aotgaudi.files import MAX_DOCUMENT_BYTES
from aotgaudi.share.remote import Pointer, Remote
from aotgaudi.share.transfer import Conduct, Partial, Sources, receive, require_room, send
from aotgaudi.store.cas import object_path, verified_chunks

_DOCUMENT_MODE = 0o644


@dataclass(frozen=True)
class Pushed:
    """The result of a push: a reference to exactly this bundle, and how much was uploaded."""

    reference: str
    num_objects: int
    num_uploaded: int
    uploaded_bytes: int


def push_bundle(
    bundle: Bundle, remote: Remote, name: str, conduct: Conduct, *, overwrite: bool = False
) -> Pushed:
    """Uploads the files of the bundle that `remote` lacks, and points `name` at it. Raises CorruptError, RemoteError."""
    files, pointer = bundle_files(bundle)
    num_uploaded, uploaded_bytes = send(remote, files, conduct, overwrite=overwrite)
    reference = conduct.retry.call(lambda: remote.publish(name, pointer, tuple(files)))
    return Pushed(reference, len(files), num_uploaded, uploaded_bytes)


def bundle_files(bundle: Bundle) -> tuple[Mapping[Digest, Path], Pointer]:
    """Returns every file of a bundle by its digest, and the pointer to the bundle."""
    signature = read_signature(bundle.path)
    pointer = Pointer(
        index=Digest.of(bundle.index_bytes), signature=None if signature is None else Digest.of(signature)
    )
    files = {digest: bundle.path / name for name, digest in _documents(pointer, bundle.index).items()}
    files |= {digest: object_path(bundle.path, digest) for digest in bundle.index.objects}
    return files, pointer


def pull_bundle(
    sources: Sources,
    name: str,
    out: Path,
    policy: TrustPolicy = ANY_BUNDLE,
    expect: Callable[[int], None] = lambda _: None,
) -> Bundle:
    """Replaces `out` by the bundle that `name` means, and returns the opened bundle.

    Calls `expect` with the size in bytes once it is known. Continues an interrupted pull.

    Raises:
        RemoteError: no remote can be used, or none knows `name`.
        MissingObjectError, CorruptError: no remote has an object, or none has it intact.
        UntrustedError: `policy` does not allow the bundle. Then no object was received.
        StoreError: `out` may not be replaced, or cannot be written.
    """
    pointers = list(_pointers(sources, name))
    with staging_directory(out) as staging:
        pointer = _receive_documents(sources, pointers, staging, policy)
        bundle = open_bundle(staging, policy)
        digests = sorted(bundle.index.objects, key=lambda digest: -digest.size_bytes)
        require_room(staging, sum(digest.size_bytes for digest in digests) - _received_bytes(staging))
        expect(bundle.index.counts.object_bytes)
        sources.each(lambda digest: _receive_object(sources, digest, staging, out), digests)
        publish(staging, out, _documents(pointer, bundle.index), digests)
    return open_bundle(out, policy)


def _pointers(sources: Sources, name: str) -> Iterator[Pointer]:
    """Yields the remotes' pointers for `name`, in order, without repetitions. Raises RemoteError if there are none."""
    found: list[Pointer] = []
    for remote in sources.usable:
        pointer = sources.ask(remote, partial(remote.resolve, name))
        if pointer is not None and pointer not in found:
            found.append(pointer)
            yield pointer
    if not found:
        sources.require_usable()
        labels = ", ".join(remote.label for remote in sources.usable)
        raise RemoteError(f"no bundle {name!r} at {labels}")


def _received_bytes(staging: Path) -> int:
    """Returns the bytes of objects that an interrupted pull has left, which are used again."""
    folders = (staging / OBJECTS_NAME, staging / PARTIAL_NAME)
    return sum(path.lstat().st_size for folder in folders for path in folder.rglob("*") if not path.is_dir())


def _receive_documents(
    sources: Sources, pointers: list[Pointer], staging: Path, policy: TrustPolicy
) -> Pointer:
    """Receives the documents of the first bundle of `pointers` for which this is possible, and returns its pointer."""
    for position, pointer in enumerate(pointers, start=1):
        try:
            index = _receive_index(sources, pointer, staging, policy)
            for name, digest in _documents(pointer, index).items():
                _receive_named(sources, name, digest, staging, MAX_DOCUMENT_BYTES)
        except (CorruptError, MissingObjectError) as error:
            if position == len(pointers):
                raise
            sources.conduct.warn(f"{error}; going on with what another remote means by that name")
            continue
        return pointer
    raise AssertionError("there is at least one pointer")


def _receive_index(sources: Sources, pointer: Pointer, staging: Path, policy: TrustPolicy) -> BundleIndex:
    """Receives the index and the signature. Raises UntrustedError if `policy` does not accept the signature."""
    _receive_named(sources, INDEX_NAME, pointer.index, staging, MAX_INDEX_BYTES)
    if pointer.signature is None:
        (staging / SIGNATURE_NAME).unlink(missing_ok=True)  # From an earlier, interrupted pull.
    else:
        _receive_named(sources, SIGNATURE_NAME, pointer.signature, staging, MAX_ENVELOPE_BYTES)
    index_bytes = (staging / INDEX_NAME).read_bytes()
    policy.require_signature(read_signature(staging), index_bytes, staging)
    return load_index(index_bytes)


def _documents(pointer: Pointer, index: BundleIndex) -> dict[str, Digest]:
    documents = {
        INDEX_NAME: pointer.index,
        MANIFEST_NAME: index.manifest,
        RECEIPT_NAME: index.receipt,
    }
    return documents if pointer.signature is None else documents | {SIGNATURE_NAME: pointer.signature}


def _receive_named(sources: Sources, name: str, digest: Digest, staging: Path, max_bytes: int) -> None:
    if digest.size_bytes > max_bytes:
        raise CorruptError(f"{name} would have {digest.size_bytes} bytes, at most {max_bytes} are read")
    received, path = staging / PARTIAL_NAME / digest.sha256, staging / name
    receive(digest, received, path, lambda file: sources.fill(digest, file, is_counted=False), is_staged=True)
    path.chmod(_DOCUMENT_MODE)


def _receive_object(sources: Sources, digest: Digest, staging: Path, older: Path) -> None:
    def fill(file: Partial) -> None:
        if not _copy(object_path(older, digest), digest, file, sources):
            sources.fill(digest, file)

    received = staging / PARTIAL_NAME / digest.sha256
    if not receive(digest, received, object_path(staging, digest), fill, is_staged=True):
        sources.conduct.advance(digest.size_bytes)


def _copy(path: Path, digest: Digest, file: Partial, sources: Sources) -> bool:
    """Copies an object from the bundle that is being replaced. Returns False if it is absent or damaged there."""
    if file.size_bytes or not path.is_file():
        return False
    try:
        for chunk in verified_chunks(path, digest):
            file.write(chunk)
    except CorruptError:
        file.restart()
        return False
    sources.conduct.advance(digest.size_bytes)
    return True
