"""Taking a bundle out of a layer, whoever made that: nothing in the archive is believed.

`tarfile` reads the archive as a stream, and nothing is ever extracted by name. Each header is checked before tarfile acts
on it. Only plain files and directories are accepted: links, devices, FIFOs and extension headers (whose content tarfile
would read into memory) are refused by their type, and so are setuid, setgid and sticky bits. The first file must be the
index. Each other file must be one that the index names, once and with its size; its digest decides where it is written. So
no name can lead outside, and no size can exceed the index's. The decompressor stops at a ratio and at a size. Whatever is
wrong is one CorruptError, in one line.

The first files of a layer, index and signature, say whether the rest is wanted, and how large it may be: `read_head`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol, cast

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
_TRAILING_BYTES = 1 << 20
"""More zeros at the end of an archive than any writer of tar adds."""
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
    """Where a bundle's files go. It verifies their digests."""

    def write(self, name: str, digest: Digest | None, chunks: Iterator[bytes]) -> None:
        """Writes the file `name` of the bundle; `digest` is None for the signature, which the index does not name."""
        ...


def unpack_bundle(source: Source, sink: Sink) -> BundleIndex:
    """Reads an archive, and gives each file of the bundle in it to `sink`. Returns the bundle's index.

    Raises CorruptError for anything but the archive of one whole bundle, and what `sink` raises.
    """
    with _archive(source) as files:
        index_bytes = _read_index_bytes(files)
        try:
            index = load_index(index_bytes)
        except ManifestError as error:
            raise _refusal(str(error)) from error
        sink.write(INDEX_NAME, Digest.of(index_bytes), iter((index_bytes,)))
        _read_files(files, index, sink)
    return index


@dataclass(frozen=True)
class Head:
    """The bytes of the first files of a layer: the index, and the signature if it follows."""

    index_bytes: bytes
    signature: bytes | None


def read_head(source: Source) -> Head:
    """Reads the beginning of an archive and parses none of it, for nobody has vouched for it. Raises CorruptError."""
    with _archive(source) as files:
        index_bytes = _read_index_bytes(files)
        member = files.next_file(_DIRECTORIES)
        if member is None or member.name != f"{BUNDLE_ROOT}/{SIGNATURE_NAME}":
            return Head(index_bytes, None)
        _check_size(member, MAX_ENVELOPE_BYTES)
        return Head(index_bytes, b"".join(files.content(member)))


def largest_archive_bytes(index: BundleIndex) -> int:
    """Returns the most that an archive of this bundle can have: its files, headers, directories and end."""
    files = _files(index)
    content = sum(digest.size_bytes for digest in files.values()) + MAX_INDEX_BYTES + MAX_ENVELOPE_BYTES
    return content + 2 * _BLOCK * (len(files) + len(_directories(files)) + 4) + _TRAILING_BYTES


def _read_index_bytes(files: _Files) -> bytes:
    member = files.next_file(_DIRECTORIES)
    if member is None or member.name != f"{BUNDLE_ROOT}/{INDEX_NAME}":
        raise _refusal("its first file is not the bundle's index" if member else "there is no bundle in it")
    _check_size(member, MAX_INDEX_BYTES)
    return b"".join(files.content(member))


def _read_files(files: _Files, index: BundleIndex, sink: Sink) -> None:
    wanted = _files(index)
    directories = _directories(wanted)
    signature = f"{BUNDLE_ROOT}/{SIGNATURE_NAME}"
    while (member := files.next_file(directories)) is not None:
        if member.name == signature:
            _check_size(member, MAX_ENVELOPE_BYTES)
            sink.write(SIGNATURE_NAME, None, files.content(member))
            continue
        digest = wanted.pop(member.name, None)
        if digest is None:
            raise _refusal(f"{member.name!r:.200} is not in the bundle's index")
        if member.size != digest.size_bytes:
            raise _refusal(f"{member.name!r:.200} has {member.size} bytes, {digest.size_bytes} by the index")
        sink.write(member.name.removeprefix(f"{BUNDLE_ROOT}/"), digest, files.content(member))
    if wanted:
        raise _refusal(f"{len(wanted)} files are missing, first: {min(wanted)}")


def _directories(names: Iterable[str]) -> frozenset[str]:
    return frozenset(str(parent) for name in names for parent in PurePosixPath(name).parents)


def _files(index: BundleIndex) -> dict[str, Digest]:
    """What must follow the index, by its name in the archive."""
    root = Path(BUNDLE_ROOT)
    files = {str(object_path(root, digest)): digest for digest in index.objects}
    files[f"{BUNDLE_ROOT}/{MANIFEST_NAME}"] = index.manifest
    files[f"{BUNDLE_ROOT}/{RECEIPT_NAME}"] = index.receipt
    return files


class _PlainMember(tarfile.TarInfo):
    """A header that is refused, before tarfile acts on it, unless it is that of a plain file or directory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _PlainMember:
        """See `tarfile.TarInfo.frombuf`. Raises CorruptError."""
        try:
            member = super().frombuf(buf, encoding, errors)
        except (ValueError, OverflowError) as error:
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


@contextlib.contextmanager
def _archive(source: Source) -> Iterator[_Files]:
    """Opens an archive; turns tarfile's errors in the block into CorruptError."""
    try:
        with tarfile.open(
            fileobj=cast("Any", source),  # It only reads.
            mode="r|",
            tarinfo=_PlainMember,
            encoding="utf-8",
            errors="strict",
        ) as archive:
            yield _Files(archive)
    except tarfile.TarError as error:
        raise _refusal(f"it cannot be read: {error}") from error


class _Files:
    """The plain files of an archive, in order. Each name is taken once."""

    def __init__(self, archive: tarfile.TarFile) -> None:
        self._archive = archive
        self._seen: set[str] = set()

    def next_file(self, directories: frozenset[str]) -> tarfile.TarInfo | None:
        """Returns the next plain file; None after the last. Passes over `directories`."""
        while (member := self._archive.next()) is not None:
            self._archive.members.clear()  # type: ignore[attr-defined] # It would keep them all.
            if member.name in self._seen:
                raise _refusal(f"{member.name!r:.200} is there twice")
            self._seen.add(member.name)
            if member.type != tarfile.DIRTYPE:
                return member
            if member.name not in directories or member.size:
                raise _refusal(f"{member.name!r:.200} is no directory of a bundle")
        return None

    def content(self, member: tarfile.TarInfo) -> Iterator[bytes]:
        """Yields a file's bytes. Read it to the end before the next header."""
        file = self._archive.extractfile(member)
        rest = member.size
        while file is not None and rest:
            chunk = file.read(min(rest, _CHUNK_BYTES))
            if not chunk:
                raise _refusal(f"it ends within {member.name!r:.200}")
            rest -= len(chunk)
            yield chunk


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
