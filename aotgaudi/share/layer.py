"""A bundle as one layer of an image: writing the compressed archive, and reading a compressed layer.

The same bundle gives the same bytes: names are sorted, times are 0, everything belongs to 0:0, modes are fixed, headers
are plain ustar, and the compressor's settings are fixed here. (Another version of zlib or libzstd may compress to
other bytes; the uncompressed digest, which is the layer's identity in an image, stays.) Nothing goes in but what the
bundle's index names, and all of it is hashed on its way: a damaged bundle gives no layer.

Reading is bounded: in memory, in the ratio of what comes out to what went in, and in the size of what comes out.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Literal, Protocol

from aotgaudi.bundle.bundle import Bundle
from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, SpecError
from aotgaudi.files import Temporary
from aotgaudi.share.oci_documents import BUNDLE_ROOT, LAYER_TYPES
from aotgaudi.share.push_pull import bundle_files
from aotgaudi.store.cas import verified_chunks

MAX_RATIO = 250
"""Compiled code compresses about 4:1, with stretches of zeros maybe 20:1. Bombs begin at 1000:1."""
MAX_ARCHIVE_BYTES = 256 << 30

_SLACK_BYTES = 1 << 20
_MAX_WINDOW_BYTES = 128 << 20
"""What zstd may take: the largest window of its levels below --ultra, and of --long=27."""
_READ_BYTES = 128 << 10

Compression = Literal["zstd", "gzip"]

BLOCK_BYTES = tarfile.BLOCKSIZE
_ZSTD_LEVEL = 3
_GZIP_LEVEL = 6
_GZIP_WINDOW_BITS = 31
"""A window of 32 KiB within a gzip header, whose time is 0."""
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
    """Hashes what it is given, compresses it, hashes that, and writes it."""

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
    """Writes the layer to `file`. Raises CorruptError where the bundle is damaged, StoreError, and OSError."""
    writer = _Writer(file, _compressor(compression))
    files = {
        path.relative_to(bundle.path).as_posix(): digest for digest, path in bundle_files(bundle)[0].items()
    }
    members = {f"{BUNDLE_ROOT}/{name}": (name, digest) for name, digest in files.items()}
    for path in sorted(
        {*members, *_directories(members)}
    ):  # The index is the first file, a folder comes before its own.
        if path not in members:
            writer.write(_header(path, tarfile.DIRTYPE, _DIRECTORY_MODE, 0))
            continue
        name, digest = members[path]
        mode = _OBJECT_MODE if name.startswith("objects/") else _FILE_MODE
        writer.write(_header(path, tarfile.REGTYPE, mode, digest.size_bytes))
        for chunk in verified_chunks(bundle.path / name, digest, bundle.mending_command):
            writer.write(chunk)
        writer.write(bytes(-digest.size_bytes % BLOCK_BYTES))
    writer.write(bytes(2 * BLOCK_BYTES))
    return writer.finish(compression)


class LayerReader:
    """The bytes of an archive. `read` raises CorruptError where the compressed bytes are bad, or a bound is passed."""

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
    """Yields what the compressed `file` holds. Raises CorruptError for a media type that we do not read."""
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


def _directories(names: Iterable[str]) -> set[str]:
    return {str(parent) for name in names for parent in PurePosixPath(name).parents if parent.name}


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
