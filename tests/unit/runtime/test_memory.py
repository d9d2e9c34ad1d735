"""The memory of a serving process: new pages, KV caches, and freed memory that is kept or given back."""

from __future__ import annotations

import errno
import mmap
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.graphs.program import CacheSpec
from aotgaudi.runtime.memory import FreedMemory, cache_memory, fault_in, new_pages

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


def older_kernel(_: Any) -> None:
    raise OSError(errno.EINVAL, "madvise")


@pytest.mark.parametrize("is_older", [False, True])
def test_faulted_in_pages_are_resident_before_anybody_writes_to_them(
    monkeypatch: pytest.MonkeyPatch, *, is_older: bool
) -> None:
    if is_older:
        monkeypatch.setattr("aotgaudi.linux.populate", older_kernel)
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


MIB = 1 << 20


class Machine:
    """So many bytes are freed, of which a trim gives all back, and steps fault `step_bytes` in again."""

    def __init__(self, step_bytes: int) -> None:
        self.freed_bytes = self.step_bytes = step_bytes
        self.num_trims = 0

    def trim(self) -> None:
        self.num_trims += 1
        self.freed_bytes = self.step_bytes

    def memory(self) -> FreedMemory:
        return FreedMemory(lambda: self.freed_bytes, self.trim)


def test_what_steps_use_again_and_again_is_kept() -> None:
    machine = Machine(200 * MIB)
    memory = machine.memory()

    assert [memory.give_back() for _ in range(100)] == [False] * 100


def test_what_a_burst_leaves_goes_back_each_time() -> None:
    machine = Machine(200 * MIB)
    memory = machine.memory()

    for num_bursts in range(1, 4):
        for _ in range(5):
            memory.give_back()
        machine.freed_bytes += 40 * MIB
        assert memory.give_back()
        assert machine.num_trims == num_bursts


def test_what_was_taken_for_usual_by_mistake_is_looked_at_again() -> None:
    machine = Machine(0)
    machine.freed_bytes = 500 * MIB
    memory = machine.memory()

    for _ in range(120):
        memory.give_back()

    assert machine.freed_bytes == 0


_PROGRAM = """
from aotgaudi.machine import anonymous_bytes
from aotgaudi.runtime.memory import freed_memory, keep_freed_memory
keep_freed_memory()
memory = freed_memory()
for _ in range(3):
    memory.give_back()
before = anonymous_bytes()
bodies = [bytearray(b"x" * (4 << 20)) for _ in range(20)]
kept = bytearray(b"x" * 100_000)  # Above the others in the heap.
held = memory.give_back()
del bodies
after = anonymous_bytes()
print(held, memory.give_back(), after - before >> 20, anonymous_bytes() - before >> 20)
"""


@pytest.mark.process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_a_real_process_gives_back_what_bodies_took() -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], cwd=root, capture_output=True, text=True, check=True, timeout=60
    )

    held, given, before, after = done.stdout.split()
    assert (held, given) == ("False", "True")
    assert int(before) >= 60
    assert int(after) <= 16
