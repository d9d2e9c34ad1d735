"""A bundle as one layer of an image: writes the compressed archive, and extracts the bundle from an untrusted one.

Writing: the same bundle gives the same bytes. Names are sorted, times are 0, everything belongs to 0:0, modes are fixed,
headers are plain ustar, and the compressor's settings are fixed here. (Another version of zlib or libzstd may give other
compressed bytes. The uncompressed digest, which identifies the layer in an image, does not change.) The layer holds only
files that the bundle's index names. All are hashed on the way, so a damaged bundle gives no layer.

Reading: the archive is not trusted. The decompressor stops at a ratio and at a size. `tarfile` reads the archive as a
stream, and nothing is extracted by name. Each header is checked before tarfile acts on it. Only plain files and
directories are accepted. Links, devices, FIFOs and extension headers (whose content tarfile would read into memory) are
refused by their type, and setuid, setgid and sticky bits are refused too. The first file must be the index. Each other
file must be one that the index names, once and with its size. Its digest decides where it is written. So no name can
lead outside, and no file can be larger than the index says. Between and after the files, only zeros are allowed. Every
fault raises a CorruptError of one line. The first files of a layer, the index and the signature, tell whether to read
the rest and how large it may be (`read_head`).
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO, Literal, Protocol, cast

from aotgaudi.bundle.bundle import Bundle
from aotgaudi.bundle.format import (
    DOCUMENT_NAMES,
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
from aotgaudi.errors import CorruptError, ManifestError, SpecError
from aotgaudi.files import Temporary
from aotgaudi.share.oci import BUNDLE_ROOT, LAYER_TYPES
from aotgaudi.share.push_pull import bundle_files
from aotgaudi.store.cas import object_path, verified_chunks

MAX_RATIO = 250
"""Compiled code compresses about 4:1, or maybe 20:1 with stretches of zeros. Bombs begin at 1000:1."""
MAX_ARCHIVE_BYTES = 256 << 30

_SLACK_BYTES = 1 << 20
_MAX_WINDOW_BYTES = 128 << 20
"""The memory that zstd may use: the largest window of its levels below --ultra, and of --long=27."""
_READ_BYTES = 128 << 10

Compression = Literal["zstd", "gzip"]

_BLOCK_BYTES = tarfile.BLOCKSIZE
_ZSTD_LEVEL = 3
_GZIP_LEVEL = 6
_GZIP_WINDOW_BITS = 31
"""A window of 32 KiB, with a gzip header whose time is 0."""
_FILE_MODE, _OBJECT_MODE, _DIRECTORY_MODE = 0o644, 0o444, 0o755


@dataclass(frozen=True, slots=True)
class Layer:
    """A written layer: the blob's digest, and `diff_id`, the sha256 of the archive before compression."""

    blob: Digest
    diff_id: str
    compression: Compression


class _Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...
    def flush(self) -> bytes: ...


class _Writer:
    """Hashes bytes, compresses them, hashes the result, and writes it."""

    def __init__(self, file: Temporary, compressor: _Compressor) -> None:
        self._file, self._compressor = file, compressor
        self._archive, self._blob = hashlib.sha256(), hashlib.sha256()
        self._size_bytes = 0

    def write(self, data: bytes) -> None:
        self._archive.update(data)
        self._emit(self._compressor.compress(data))

    def finish(self, compression: Compression) -> Layer:
        self._emit(self._compressor.flush())
        blob = Digest(self._blob.hexdigest(), self._size_bytes)
        return Layer(blob, f"sha256:{self._archive.hexdigest()}", compression)

    def _emit(self, data: bytes) -> None:
        self._blob.update(data)
        self._file.write(data)
        self._size_bytes += len(data)


def write_layer(bundle: Bundle, file: Temporary, compression: Compression) -> Layer:
    """Writes the layer to `file`. Raises CorruptError if the bundle is damaged, StoreError, and OSError."""
    writer = _Writer(file, _compressor(compression))
    files = {
        path.relative_to(bundle.path).as_posix(): digest for digest, path in bundle_files(bundle)[0].items()
    }
    members = {f"{BUNDLE_ROOT}/{name}": (name, digest) for name, digest in files.items()}
    # In sorted order, the index is the first file, and a folder comes before its contents.
    for path in sorted({*members, *_directories(members)}):
        if path not in members:
            writer.write(_header(path, tarfile.DIRTYPE, _DIRECTORY_MODE, 0))
            continue
        name, digest = members[path]
        mode = _OBJECT_MODE if name.startswith("objects/") else _FILE_MODE
        writer.write(_header(path, tarfile.REGTYPE, mode, digest.size_bytes))
        for chunk in verified_chunks(bundle.path / name, digest, bundle.mending_command):
            writer.write(chunk)
        writer.write(bytes(-digest.size_bytes % _BLOCK_BYTES))
    writer.write(bytes(2 * _BLOCK_BYTES))
    return writer.finish(compression)


class LayerReader:
    """The bytes of an archive. `read` raises CorruptError if the compressed bytes are bad or a limit is exceeded."""

    def __init__(self, compressed: BinaryIO, archive: Any, max_bytes: int = MAX_ARCHIVE_BYTES) -> None:
        self._compressed, self._archive, self._max_bytes = compressed, archive, max_bytes
        self._num_read = 0

    def read(self, size: int) -> bytes:
        """Returns at most `size` bytes; none at the end."""
        data = _decompressed(self._archive, size)
        self._num_read += len(data)
        if self._num_read > self._max_bytes:
            raise CorruptError(f"the layer has more than {self._max_bytes} bytes when it is decompressed")
        if self._num_read > _SLACK_BYTES + MAX_RATIO * self._compressed.tell():
            raise CorruptError(f"the layer decompresses to more than {MAX_RATIO} times its size")
        return data


@contextlib.contextmanager
def open_layer(file: BinaryIO, media_type: str, max_bytes: int = MAX_ARCHIVE_BYTES) -> Iterator[LayerReader]:
    """Yields a reader of the archive in the compressed `file`. Raises CorruptError for an unsupported media type."""
    if media_type == LAYER_TYPES["gzip"]:
        with gzip.GzipFile(fileobj=file, mode="rb") as archive:
            yield LayerReader(file, archive, max_bytes)
    elif media_type == LAYER_TYPES["zstd"]:
        import zstandard

        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        with decompressor.stream_reader(
            file, read_size=_READ_BYTES, read_across_frames=True, closefd=False
        ) as stream:
            yield LayerReader(file, stream, max_bytes)
    else:
        known = ", ".join(LAYER_TYPES.values())
        raise CorruptError(f"a layer of type {media_type!r:.100} cannot be read; should be one of: {known}")


def _compressor(compression: Compression) -> _Compressor:
    if compression == "gzip":
        return zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_WINDOW_BITS)
    import zstandard

    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True).compressobj()


def _directories(names: Iterable[str]) -> frozenset[str]:
    """Returns the directories that hold these files."""
    return frozenset(str(parent) for name in names for parent in PurePosixPath(name).parents if parent.name)


def _header(name: str, kind: bytes, mode: int, size_bytes: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.size = kind, mode, size_bytes
    try:
        return member.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")
    except ValueError as error:
        raise SpecError(
            name, f"cannot be put into an image: {error}", "objects of less than 8 GiB"
        ) from error


def _decompressed(archive: Any, size: int) -> bytes:
    from zstandard import ZstdError

    try:
        return bytes(archive.read(size))
    except (EOFError, gzip.BadGzipFile, zlib.error, ZstdError, io.UnsupportedOperation) as error:
        raise CorruptError(f"the layer cannot be decompressed: {error}") from error


_CHUNK_BYTES = 1 << 20
_TRAILING_BYTES = 1 << 20
"""A limit on the zeros at the end of an archive, above what any writer of tar adds."""
_SPECIAL_BITS = 0o7000
_KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a character device",
    tarfile.BLKTYPE: "a block device",
    tarfile.FIFOTYPE: "a FIFO",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}
_ROOT_DIRECTORIES = _directories([f"{BUNDLE_ROOT}/{INDEX_NAME}"])


class Source(Protocol):
    """Bytes of an uncompressed archive."""

    def read(self, size: int) -> bytes:
        """Returns at most `size` bytes; none at the end."""
        ...


class Sink(Protocol):
    """The destination of a bundle's files. It verifies their digests."""

    def write(self, name: str, digest: Digest | None, chunks: Iterator[bytes]) -> None:
        """Writes the file `name` of the bundle. `digest` is None for the signature, which the index does not name."""
        ...


def unpack_bundle(source: Source, sink: Sink) -> BundleIndex:
    """Reads an archive, passes each file of its bundle to `sink`, and returns the bundle's index.

    Raises CorruptError for anything except an archive of exactly one whole bundle, and what `sink` raises.
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
    """The bytes of a layer's first files: the index, and the signature if it follows."""

    index_bytes: bytes
    signature: bytes | None


def read_head(source: Source) -> Head:
    """Reads the first files of an archive. Does not parse them, because they are not verified yet. Raises CorruptError."""
    with _archive(source) as files:
        index_bytes = _read_index_bytes(files)
        member = files.next_file(_ROOT_DIRECTORIES)
        if member is None or member.name != f"{BUNDLE_ROOT}/{SIGNATURE_NAME}":
            return Head(index_bytes, None)
        _check_size(member, MAX_ENVELOPE_BYTES)
        return Head(index_bytes, b"".join(files.content(member)))


def largest_archive_bytes(index: BundleIndex) -> int:
    """Returns how many bytes an archive of this bundle can have at most: files, headers, directories and end."""
    files = _files(index)
    content = sum(digest.size_bytes for digest in files.values()) + MAX_INDEX_BYTES + MAX_ENVELOPE_BYTES
    return content + 2 * _BLOCK_BYTES * (len(files) + len(_directories(files)) + 5) + _TRAILING_BYTES


def _read_index_bytes(files: _Files) -> bytes:
    member = files.next_file(_ROOT_DIRECTORIES)
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


def _files(index: BundleIndex) -> dict[str, Digest]:
    """Returns the files that must follow the index, by their names in the archive."""
    root = Path(BUNDLE_ROOT)
    files = {str(object_path(root, digest)): digest for digest in index.objects}
    files[f"{BUNDLE_ROOT}/{MANIFEST_NAME}"] = index.manifest
    files[f"{BUNDLE_ROOT}/{RECEIPT_NAME}"] = index.receipt
    return files


class _PlainMember(tarfile.TarInfo):
    """A header of a plain file or directory. Others are refused before tarfile acts on them."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _PlainMember:
        """See `tarfile.TarInfo.frombuf`. Raises CorruptError."""
        try:
            member = super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined] # A block of zeros: the end.
            raise
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


@contextlib.contextmanager
def _archive(source: Source) -> Iterator[_Files]:
    """Opens an archive, and turns tarfile's errors in the block into CorruptError."""
    try:
        with tarfile.open(
            fileobj=cast("Any", source),  # tarfile only calls read().
            mode="r|",
            tarinfo=_PlainMember,
            encoding="utf-8",
            errors="strict",
        ) as archive:
            yield _Files(archive)
    except tarfile.TarError as error:
        raise _refusal(f"it cannot be read: {error}") from error


class _Files:
    """The plain files of an archive, in order. A repeated name is refused."""

    def __init__(self, archive: tarfile.TarFile) -> None:
        self._archive = archive
        self._stream = cast("IO[bytes]", archive.fileobj)
        self._seen: set[str] = set()

    def next_file(self, directories: frozenset[str]) -> tarfile.TarInfo | None:
        """Returns the next plain file; None after the last. Skips `directories`."""
        while (member := self._archive.next()) is not None:
            self._archive.members.clear()  # type: ignore[attr-defined] # It would keep them all.
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
        """Yields a file's bytes. Read all of them before you ask for the next file."""
        file = self._archive.extractfile(member)
        rest = member.size
        while file is not None and rest:
            chunk = file.read(min(rest, _CHUNK_BYTES))
            if not chunk:
                raise _refusal(f"it ends within {member.name!r:.200}")
            rest -= len(chunk)
            yield chunk
        if self._stream.read(-member.size % _BLOCK_BYTES).strip(b"\0"):
            raise _refusal(f"there is something between {member.name!r:.200} and the next header")

    def _check_end(self) -> None:
        num_bytes = 0
        while chunk := self._stream.read(_CHUNK_BYTES):
            num_bytes += len(chunk)
            if num_bytes > _TRAILING_BYTES or chunk.strip(b"\0"):
                raise _refusal("there is something behind its end")


def _check_name(name: str) -> None:
    """Refuses names that no bundle has. They would be refused anyway, but without this reason."""
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
    """Writes a bundle's files below `root`, a new directory of ours, without syncing. Raises CorruptError and OSError."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, name: str, digest: Digest | None, chunks: Iterator[bytes]) -> None:
        """See `Sink.write`. The path of an object is made from its digest."""
        is_object = name not in DOCUMENT_NAMES
        path = object_path(self.root, digest) if is_object and digest else self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            found = _write_hashed(file, chunks)
            os.fchmod(file.fileno(), _OBJECT_MODE if is_object else _FILE_MODE)
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
