"""Taking a bundle out of a layer, whoever made that: nothing in the archive is believed.

The archive is read header by header, in blocks; nothing is ever extracted "by name". Its files must be the index, first,
and then exactly what that index names; where each is written follows from its digest, not from its name in the archive.
So no name can lead outside, and no size can exceed the index's. Everything but plain files and directories
(links, devices, FIFOs, extension headers) is refused by its type, with what else no bundle has: setuid, setgid and sticky
bits, names twice, further entries. Memory is bounded by blocks and by the index; decompression stops at a ratio
and at a size. What is wrong is one CorruptError, in one line.

The first files of a layer, index and signature, say whether the rest is wanted, and how large it may be: `read_head`.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

from aotgaudi.bundle.format import (
    INDEX_NAME,
    MANIFEST_NAME,
    MAX_INDEX_BYTES,
    SIGNATURE_NAME,
    BundleIndex,
    load_index,
)
from aotgaudi.bundle.kind import RECEIPT_NAME
from aotgaudi.bundle.signature import MAX_ENVELOPE_BYTES
from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, ManifestError
from aotgaudi.share.oci_documents import BUNDLE_ROOT
from aotgaudi.store.cas import object_path

_BLOCK = tarfile.BLOCKSIZE
_CHUNK_BYTES = 1 << 20
_MAX_TRAILING_BYTES = 1 << 20
_SPECIAL_BITS = 0o7000
_KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a character device",
    tarfile.BLKTYPE: "a block device",
    tarfile.FIFOTYPE: "a FIFO",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}
_DIRECTORIES = frozenset(
    str(path) for path in (PurePosixPath(BUNDLE_ROOT), *PurePosixPath(BUNDLE_ROOT).parents) if path.name
)


class Source(Protocol):
    """Bytes of an uncompressed archive."""

    def read(self, size: int) -> bytes:
        """Returns at most `size` bytes; none at the end."""
        ...


class Sink(Protocol):
    """Where a bundle's files go. Digests are verified by who writes."""

    def write(self, name: str, digest: Digest | None, chunks: Iterator[bytes]) -> None:
        """Writes the file `name` of the bundle; `digest` is None for the signature, which none names."""
        ...


def unpack_bundle(source: Source, sink: Sink) -> BundleIndex:
    """Reads an archive, and gives each file of the bundle in it to `sink`. Returns the bundle's index.

    Raises CorruptError for whatever is not the archive of one whole bundle, and what `sink` raises.
    """
    reader = _Reader(source)
    data, index = _read_index(reader)
    sink.write(INDEX_NAME, Digest.of(data), iter((data,)))
    _read_files(reader, index, sink)
    return index


@dataclass(frozen=True)
class Head:
    """The bytes of the first files of a layer: the index, and the signature where that follows."""

    index_bytes: bytes
    signature: bytes | None


def read_head(source: Source) -> Head:
    """Reads the beginning of an archive; parses none of it, for nobody has vouched for it. Raises CorruptError."""
    reader = _Reader(source)
    index_bytes = _read_index_bytes(reader)
    member = reader.next_file(_DIRECTORIES)
    if member is None or member.name != f"{BUNDLE_ROOT}/{SIGNATURE_NAME}":
        return Head(index_bytes, None)
    _check_size(member, MAX_ENVELOPE_BYTES)
    return Head(index_bytes, b"".join(reader.content(member)))


def largest_archive_bytes(index: BundleIndex) -> int:
    """Returns the most that an archive of this bundle can have: its files, headers, directories and end."""
    files = _files(index)
    content = sum(digest.size_bytes for digest in files.values()) + MAX_INDEX_BYTES + MAX_ENVELOPE_BYTES
    return content + 2 * _BLOCK * (len(files) + len(_directories(files)) + 4) + _MAX_TRAILING_BYTES


def _read_index(reader: _Reader) -> tuple[bytes, BundleIndex]:
    data = _read_index_bytes(reader)
    try:
        return data, load_index(data)
    except ManifestError as error:
        raise _refusal(str(error)) from error


def _read_index_bytes(reader: _Reader) -> bytes:
    member = reader.next_file(_DIRECTORIES)
    if member is None or member.name != f"{BUNDLE_ROOT}/{INDEX_NAME}":
        raise _refusal("its first file is not the bundle's index" if member else "there is no bundle in it")
    if member.size > MAX_INDEX_BYTES:
        raise _refusal(
            f"{member.name!r:.200} would have {member.size} bytes, at most {MAX_INDEX_BYTES} are read"
        )
    return b"".join(reader.content(member))


def _read_files(reader: _Reader, index: BundleIndex, sink: Sink) -> None:
    files = _files(index)
    directories = _directories(files)
    signature = f"{BUNDLE_ROOT}/{SIGNATURE_NAME}"
    while (member := reader.next_file(directories)) is not None:
        if member.name == signature:
            _check_size(member, MAX_ENVELOPE_BYTES)
            sink.write(SIGNATURE_NAME, None, reader.content(member))
            continue
        digest = files.pop(member.name, None)
        if digest is None:
            raise _refusal(f"{member.name!r:.200} is not in the bundle's index")
        if member.size != digest.size_bytes:
            raise _refusal(f"{member.name!r:.200} has {member.size} bytes, {digest.size_bytes} by the index")
        sink.write(member.name.removeprefix(f"{BUNDLE_ROOT}/"), digest, reader.content(member))
    if files:
        raise _refusal(f"{len(files)} files are missing, first: {min(files)}")


def _directories(names: Iterable[str]) -> frozenset[str]:
    return frozenset(str(parent) for name in names for parent in PurePosixPath(name).parents)


def _files(index: BundleIndex) -> dict[str, Digest]:
    """What must follow the index, by its name in the archive."""
    root = Path(BUNDLE_ROOT)
    files = {str(object_path(root, digest)): digest for digest in index.objects}
    files[f"{BUNDLE_ROOT}/{MANIFEST_NAME}"] = index.manifest
    files[f"{BUNDLE_ROOT}/{RECEIPT_NAME}"] = index.receipt
    return files


class _Reader:
    """Yields the members of an archive. Each name is taken once."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._seen: set[str] = set()

    def next_file(self, directories: frozenset[str]) -> tarfile.TarInfo | None:
        """Returns the next plain file; None after the last. Passes over `directories`."""
        while (block := self._exactly(_BLOCK, "a header")).strip(b"\0"):
            member = _parse(block)
            if member.name in self._seen:
                raise _refusal(f"{member.name!r:.200} is there twice")
            self._seen.add(member.name)
            if member.type != tarfile.DIRTYPE:
                return member
            if member.name not in directories or member.size:
                raise _refusal(f"{member.name!r:.200} is no directory of a bundle")
        self._check_end()
        return None

    def content(self, member: tarfile.TarInfo) -> Iterator[bytes]:
        """Yields a file's bytes. To be read to the end before the next header."""
        rest = member.size
        while rest:
            chunk = self._source.read(min(rest, _CHUNK_BYTES))
            if not chunk:
                raise _refusal(f"it ends within {member.name!r:.200}")
            rest -= len(chunk)
            yield chunk
        if self._exactly(-member.size % _BLOCK, "padding").strip(b"\0"):
            raise _refusal(f"there is something between {member.name!r:.200} and the next header")

    def _exactly(self, size: int, what: str) -> bytes:
        data = b""
        while len(data) < size:
            chunk = self._source.read(size - len(data))
            if not chunk:
                raise _refusal(f"it ends within {what}")
            data += chunk
        return data

    def _check_end(self) -> None:
        num_bytes = 0
        while chunk := self._source.read(_CHUNK_BYTES):
            num_bytes += len(chunk)
            if chunk.strip(b"\0") or num_bytes > _MAX_TRAILING_BYTES:
                raise _refusal("there is something behind its end")


def _parse(block: bytes) -> tarfile.TarInfo:
    try:
        member = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.HeaderError, ValueError, OverflowError) as error:
        raise _refusal(f"a header cannot be read: {error}") from error
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
        kind = _KINDS.get(member.type, f"an entry of type {member.type!r}")
        raise _refusal(f"{member.name!r:.200} is {kind}; a bundle has plain files and directories")
    if member.mode & _SPECIAL_BITS:
        raise _refusal(f"{member.name!r:.200} has mode {member.mode:o} (setuid, setgid or sticky)")
    if member.size < 0:
        raise _refusal(f"{member.name!r:.200} has a negative size")
    _check_name(member.name)
    return member


def _check_name(name: str) -> None:
    """Refuses by the reason what would be refused anyway, for no bundle has such a name."""
    parts = name.split("/")
    if name.startswith("/"):
        raise _refusal(f"{name!r:.200} is an absolute path")
    if ".." in parts:
        raise _refusal(f"{name!r:.200} leads out of the directory")
    if "" in parts or "." in parts or "\\" in name or not name.isprintable() or not name.isascii():
        raise _refusal(f"{name!r:.200} is no plain path")


def _check_size(member: tarfile.TarInfo, max_bytes: int) -> None:
    if member.size > max_bytes:
        raise _refusal(f"{member.name!r:.200} has {member.size} bytes, at most {max_bytes} are read")


def _refusal(reason: str) -> CorruptError:
    return CorruptError(f"the layer is not that of a bundle: {reason}")


class DirectorySink:
    """Writes a bundle's files below `root`, a new directory of ours, not durably. Raises CorruptError and OSError."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, name: str, digest: Digest | None, chunks: Iterator[bytes]) -> None:
        """See `Sink.write`. The path of an object is made from its digest."""
        is_object = name not in (INDEX_NAME, MANIFEST_NAME, RECEIPT_NAME, SIGNATURE_NAME)
        path = object_path(self.root, digest) if is_object and digest else self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            found = _write_hashed(file, chunks)
            os.fchmod(file.fileno(), 0o444 if is_object else 0o644)
        if digest is not None and found != digest:
            raise _refusal(f"{name} has sha256 {found.sha256}, another one by the index")


def _write_hashed(file: BinaryIO, chunks: Iterator[bytes]) -> Digest:
    state, size_bytes = hashlib.sha256(), 0
    for chunk in chunks:
        state.update(chunk)
        file.write(chunk)
        size_bytes += len(chunk)
    file.flush()
    return Digest(state.hexdigest(), size_bytes)
