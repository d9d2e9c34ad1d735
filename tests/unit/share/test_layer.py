"""Layers that are compressed, badly compressed, and far too well compressed."""

from __future__ import annotations

import gzip
import io
import random
import tracemalloc

import pytest
import zstandard

from aotgaudi.errors import CorruptError
from aotgaudi.share.layer import MAX_RATIO, open_layer
from aotgaudi.share.oci import LAYER_TYPES

NOISE = random.Random(3).randbytes(3 << 20)


def packed(data: bytes, compression: str) -> bytes:
    return gzip.compress(data) if compression == "gzip" else zstandard.ZstdCompressor().compress(data)


def read(data: bytes, compression: str, max_bytes: int = 1 << 40, step: int = 100_000) -> bytes:
    with open_layer(io.BytesIO(data), LAYER_TYPES[compression], max_bytes) as layer:
        return b"".join(iter(lambda: layer.read(step), b""))


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_what_was_compressed_comes_back(compression: str) -> None:
    assert read(packed(NOISE, compression), compression) == NOISE
    assert read(packed(NOISE, compression) + packed(b"more", compression), compression) == NOISE + b"more"
    assert read(packed(b"", compression), compression) == b""


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_a_bomb_is_stopped_before_it_fills_the_memory(compression: str) -> None:
    bomb = (
        packed(bytes(1 << 20), compression) * 400 if compression == "zstd" else gzip.compress(bytes(64 << 20))
    )

    tracemalloc.start()
    with pytest.raises(CorruptError, match=f"more than {MAX_RATIO} times its size"):
        read(bomb, compression)
    assert tracemalloc.get_traced_memory()[1] < len(bomb) + (48 << 20)
    tracemalloc.stop()


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_an_absolute_cap_holds(compression: str) -> None:
    data = packed(NOISE, compression)

    assert read(data, compression, len(NOISE)) == NOISE
    with pytest.raises(CorruptError, match=f"more than {len(NOISE) - 1} bytes"):
        read(data, compression, len(NOISE) - 1)


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_damage_is_said_in_one_line_or_seen_by_who_hashes(compression: str) -> None:
    data = packed(NOISE[: 1 << 16], compression)
    chance = random.Random(5)
    for _ in range(200):
        changed = bytearray(data)
        changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        found = outcome(bytes(changed[: chance.randrange(len(data))]), compression)
        assert found != NOISE[: 1 << 16]
        assert not isinstance(found, str) or "\n" not in found


def outcome(data: bytes, compression: str) -> bytes | str:
    try:
        return read(data, compression)
    except CorruptError as error:
        return str(error)


def test_a_window_that_takes_too_much_memory_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = compressor.compress(NOISE) + compressor.flush()

    with pytest.raises(CorruptError, match="cannot be decompressed"):
        read(data, "zstd")


@pytest.mark.parametrize("data", [b"", b"x", b"\x1f\x8b", bytes(100)])
def test_what_is_not_compressed_is_no_archive(data: bytes) -> None:
    found = outcome(data, "gzip")
    assert found == b"" or "cannot be decompressed" in str(found)


@pytest.mark.parametrize("media_type", ["application/vnd.oci.image.layer.v1.tar", "text/plain", ""])
def test_other_media_types_are_refused(media_type: str) -> None:
    with pytest.raises(CorruptError, match="should be one of"), open_layer(io.BytesIO(b""), media_type):
        pass
