"""A bundle as one layer of an image: writes the compressed archive, and unpacks the bundle from one.

The same bundle gives the same bytes. Names are sorted, times are 0, everything belongs to 0:0, modes are fixed, headers are
plain ustar, and the compressor's settings are fixed here. (Another version of zlib or libzstd may give other compressed
bytes. The uncompressed digest, which identifies the layer in an image, does not change.) The layer holds only files that
the bundle's index names. All are hashed on the way, so a damaged bundle gives no layer.

An archive that is unpacked may be hostile. Its first file must be the index, and only files that the index names may
follow, once and with their sizes. So no name leads outside, and nothing grows larger than the index says. What the files
contain is not checked here: see `bundle.verify`.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import shutil
import tarfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, Literal, Protocol, cast

from aotgaudi.bundle.bundle import Bundle, read_signature
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
from aotgaudi.errors import CorruptError, ManifestError, SpecError
from aotgaudi.files import Temporary
from aotgaudi.share.oci import BUNDLE_ROOT, LAYER_TYPES
from aotgaudi.store.cas import object_path, verified_chunks

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

    def finish(self) -> Layer:
        self._emit(self._compressor.flush())
        blob = Digest(self._blob.hexdigest(), self._size_bytes)
        return Layer(blob, f"sha256:{self._archive.hexdigest()}")

    def _emit(self, data: bytes) -> None:
        self._blob.update(data)
        self._file.write(data)
        self._size_bytes += len(data)


def write_layer(bundle: Bundle, file: Temporary, compression: Compression) -> Layer:
    """Writes the layer to `file`. Raises CorruptError if the bundle is damaged, StoreError, and OSError."""
    writer = _Writer(file, _compressor(compression))
    files = _named_files(bundle.index) | {INDEX_NAME: Digest.of(bundle.index_bytes)}
    signature = read_signature(bundle.path)
    if signature is not None:
        files[SIGNATURE_NAME] = Digest.of(signature)
    members = {f"{BUNDLE_ROOT}/{name}": (name, digest) for name, digest in files.items()}
    # In sorted order, the index is the first file, and a folder comes before its contents.
    for path in sorted({*members, *_directories(members)}):
        if path not in members:
            writer.write(_header(path, tarfile.DIRTYPE, _DIRECTORY_MODE, 0))
            continue
        name, digest = members[path]
        writer.write(_header(path, tarfile.REGTYPE, _mode_of(name), digest.size_bytes))
        for chunk in verified_chunks(bundle.path / name, digest, bundle.mending_command):
            writer.write(chunk)
        writer.write(bytes(-digest.size_bytes % _BLOCK_BYTES))
    writer.write(bytes(2 * _BLOCK_BYTES))
    return writer.finish()


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


def _named_files(index: BundleIndex) -> dict[str, Digest]:
    """Returns the files that an index names, by their paths in the bundle."""
    files = {object_path(Path(), digest).as_posix(): digest for digest in index.objects}
    return files | {MANIFEST_NAME: index.manifest, RECEIPT_NAME: index.receipt}


def _mode_of(name: str) -> int:
    return _OBJECT_MODE if name.startswith("objects/") else _FILE_MODE


def unpack_layer(file: BinaryIO, media_type: str, root: Path) -> None:
    """Unpacks the bundle of a layer into `root`, a new directory of ours.

    Raises CorruptError for anything except the files of one whole bundle, and OSError.
    """
    from zstandard import ZstdError

    try:
        with (
            _decompressed(file, media_type) as stream,
            tarfile.open(fileobj=stream, mode="r|", tarinfo=_PlainMember) as archive,
        ):
            _unpack(archive, root)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, ZstdError) as error:
        raise _refusal(f"it cannot be read: {error}") from error


def _decompressed(file: BinaryIO, media_type: str) -> contextlib.AbstractContextManager[IO[bytes]]:
    if media_type == LAYER_TYPES["gzip"]:
        return cast("IO[bytes]", gzip.GzipFile(fileobj=file, mode="rb"))
    if media_type == LAYER_TYPES["zstd"]:
        import zstandard

        stream = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True, closefd=False)
        return cast("IO[bytes]", stream)
    known = ", ".join(LAYER_TYPES.values())
    raise CorruptError(f"a layer of type {media_type!r:.100} cannot be read; should be one of: {known}")


class _PlainMember(tarfile.TarInfo):
    """The header of a file or a directory. Others are refused before tarfile acts on them: it reads some into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _PlainMember:
        """See `tarfile.TarInfo.frombuf`. Raises CorruptError."""
        member = super().frombuf(buf, encoding, errors)
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
            raise _refusal(f"{member.name!r:.200} is neither a plain file nor a directory")
        return member


def _unpack(archive: tarfile.TarFile, root: Path) -> None:
    first, signature = f"{BUNDLE_ROOT}/{INDEX_NAME}", f"{BUNDLE_ROOT}/{SIGNATURE_NAME}"
    sizes = {first: range(MAX_INDEX_BYTES + 1)}
    directories = set(_directories(sizes))
    for member in archive:
        if member.isdir() and member.name in directories:
            directories.remove(member.name)
            continue
        if member.isdir() or member.size not in sizes.pop(member.name, ()):
            raise _refusal(
                f"{member.name!r:.200} of {member.size} bytes is not what the index names, or is there twice"
            )
        _extract(archive, member, root)
        if member.name == first:
            sizes = _sizes_of(root / INDEX_NAME) | {signature: range(MAX_ENVELOPE_BYTES + 1)}
            directories |= _directories(sizes) - _directories([first])
    missing = set(sizes) - {signature}
    if missing:
        raise _refusal(f"{len(missing)} files are missing, first: {min(missing)}")


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, root: Path) -> None:
    name = member.name.removeprefix(f"{BUNDLE_ROOT}/")
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with cast("IO[bytes]", archive.extractfile(member)) as source, path.open("xb") as file:
        shutil.copyfileobj(source, file)
        os.fchmod(file.fileno(), _mode_of(name))


def _sizes_of(index_path: Path) -> dict[str, range]:
    """Returns the sizes that the files named by the index may have, by their names in the archive."""
    try:
        files = _named_files(load_index(index_path.read_bytes()))
    except ManifestError as error:
        raise _refusal(str(error)) from error
    return {
        f"{BUNDLE_ROOT}/{name}": range(digest.size_bytes, digest.size_bytes + 1)
        for name, digest in files.items()
    }


def _refusal(reason: str) -> CorruptError:
    return CorruptError(f"the layer is not that of a bundle: {reason}")
