"""Memory of our own: zeroed, as large as asked for, and there before it is used."""

from __future__ import annotations

import ctypes
import mmap
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aotgaudi.graphs.program import CacheSpec
from aotgaudi.runtime.memory import cache_memory, fault_in, new_pages

SIZE = 48 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("num_bytes", [0, 1, mmap.PAGESIZE - 1, mmap.PAGESIZE, 3 * mmap.PAGESIZE + 5])
def test_pages_are_zeroed_and_writable(num_bytes: int) -> None:
    pages = new_pages(num_bytes)
    fault_in(pages)

    assert bytes(pages) == bytes(num_bytes)
    pages[:] = b"\xff" * num_bytes
    assert bytes(pages) == b"\xff" * num_bytes


def older_kernel(_: Any) -> Any:
    """A C library whose madvise knows nothing of what is asked."""
    return SimpleNamespace(madvise=ctypes.CFUNCTYPE(ctypes.c_int)(lambda: -1))


@pytest.mark.parametrize("is_older", [False, True])
def test_faulted_in_pages_are_resident_before_anybody_writes_to_them(
    monkeypatch: pytest.MonkeyPatch, *, is_older: bool
) -> None:
    if is_older:
        monkeypatch.setattr("aotgaudi.runtime.memory.ctypes.CDLL", older_kernel)
    pages = new_pages(SIZE)
    before = resident_bytes()

    fault_in(pages)

    assert resident_bytes() - before >= 0.9 * SIZE
    assert not any(pages[:: mmap.PAGESIZE])


def test_caches_get_a_block_more_than_the_server_has() -> None:
    specs = [
        CacheSpec(name="0", shape=(2, "num_blocks + 1", 3, 16, 8), dtype="bfloat16"),
        CacheSpec(name="1", shape=(2, "num_blocks + 1", 1, 4), dtype="float32"),
    ]

    memory = cache_memory(specs, 7)

    assert {name: len(pages) for name, pages in memory.items()} == {
        "0": 2 * prod((2, 8, 3, 16, 8)),
        "1": 4 * prod((2, 8, 1, 4)),
    }
