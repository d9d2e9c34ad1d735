"""A bundle as one layer: a tar archive, compressed while it is written and hashed on both sides.

The same bundle gives the same bytes: names are sorted, times are 0, everything belongs to 0:0, modes are fixed, headers
are plain ustar, and the compressor's settings are written here. (Another version of zlib or libzstd may compress to
other bytes; the uncompressed digest, which is the layer's identity in an image, stays.) Nothing goes in but what the
bundle's index names, and all of it is hashed on its way: a damaged bundle gives no layer.
"""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal, Protocol

from aotgaudi.atomicfile import Temporary
from aotgaudi.bundle.opening import Bundle
from aotgaudi.bundle.report import mending_command
from aotgaudi.bundle.transfer import bundle_files
from aotgaudi.digest import Digest
from aotgaudi.errors import SpecError
from aotgaudi.oci.labels import BUNDLE_ROOT
from aotgaudi.store.reading import verified_chunks

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
        for chunk in verified_chunks(bundle.path / name, digest, mending_command(bundle.path)):
            writer.write(chunk)
        writer.write(bytes(-digest.size_bytes % BLOCK_BYTES))
    writer.write(bytes(2 * BLOCK_BYTES))
    return writer.finish(compression)


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
