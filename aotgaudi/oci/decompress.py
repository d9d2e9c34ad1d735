"""Reading a compressed layer, with bounds: on memory, on the ratio of what comes out to what went in, and on its size."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from aotgaudi.errors import CorruptError
from aotgaudi.oci.documents import LAYER_TYPES

MAX_RATIO = 250
"""Compiled code compresses about 4:1, with stretches of zeros maybe 20:1. Bombs begin at 1000:1."""
MAX_ARCHIVE_BYTES = 256 << 30

_SLACK_BYTES = 1 << 20
_MAX_WINDOW_BYTES = 128 << 20
"""What zstd may take: the largest window of its levels below --ultra, and of --long=27."""
_READ_BYTES = 128 << 10


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
    """Yields what the compressed `file` holds. Raises CorruptError for a media type that is no layer's of ours."""
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


def _decompressed(archive: Any, size: int) -> bytes:
    from zstandard import ZstdError

    try:
        return bytes(archive.read(size))
    except (EOFError, gzip.BadGzipFile, zlib.error, ZstdError) as error:
        raise CorruptError(f"the layer cannot be decompressed: {error}") from error
    except io.UnsupportedOperation as error:
        raise CorruptError(f"the layer cannot be decompressed: {error}") from error
