"""Manages the memory of a serving process: makes pages present before use, and keeps freed memory. Imports no torch.

Units allocate their intermediate tensors on every call. By default, glibc returns freed buffers of some hundred kilobytes to
the kernel, and the next call faults them in again. A decode step of 29 ms then takes 51 ms (docs/benchmarks.md). The working
set of a serving process is constant, so freed memory is kept. It is kept in one arena, because only the engine's thread
allocates much. After a burst of requests, `FreedMemory` gives the excess back.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from aotgaudi import linux
from aotgaudi.machine import anonymous_bytes
from aotgaudi.manifest.memory import tensor_bytes

if TYPE_CHECKING:  # The API server imports this module too, and runs no programs.
    from aotgaudi.graphs.program import CacheSpec


def new_pages(num_bytes: int) -> memoryview:
    """Returns new anonymous pages, but no huge ones: with a full page cache, these cost the kernel more than they save."""
    pages = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memoryview(pages)[:num_bytes]


def fault_in(pages: memoryview) -> None:
    """Makes the kernel back all of `pages`, which must be new, with zeroed memory. Other threads go on meanwhile."""
    if not pages:
        return
    try:
        linux.populate(pages)
    except OSError:
        pages[:: mmap.PAGESIZE] = bytes(-(-len(pages) // mmap.PAGESIZE))  # An older kernel.


def cache_memory(specs: Iterable[CacheSpec], num_blocks: int) -> dict[str, memoryview]:
    """Returns zeroed memory for the KV caches of a server with `num_blocks` blocks, by name, with all pages present.

    So a machine with too little memory fails at the start, and no step waits for a page.
    """
    found = {spec.name: new_pages(tensor_bytes(spec.sizes(num_blocks), spec.dtype)) for spec in specs}
    for pages in found.values():
        fault_in(pages)
    return found


_LARGEST_MMAP_THRESHOLD_BYTES = 32 << 20
"""The maximum of mallopt(3). Larger buffers are still mapped and unmapped."""
_KEPT_BYTES = 1 << 30
_BURST_BYTES = 32 << 20
"""The excess that is worth a trim. After a trim, the next step must fault its buffers in again, once."""
_SETTLING_TURNS = 2
_LEARNT_TURNS = 120


def keep_freed_memory() -> bool:
    """Tunes glibc's malloc for the whole process. Returns False if the C library has no ``mallopt``."""
    settings = (
        (linux.M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD_BYTES),
        (linux.M_TRIM_THRESHOLD, _KEPT_BYTES),
        (linux.M_ARENA_MAX, 1),
    )
    try:
        return all(linux.mallopt(name, value) for name, value in settings)
    except OSError:
        return False


class FreedMemory:
    """Gives freed memory back to the kernel when there is much more of it than usual. Use it on one thread only.

    Freed memory is resident but not allocated. The usual amount (a step's buffers, Python's reserves) is measured in the
    turns after each trim, when steps have faulted their buffers in again. After many turns, it trims in any case and
    measures again.

    Args:
        freed_bytes: Returns the amount of freed memory.
        trim: Gives freed memory back to the kernel.
    """

    def __init__(self, freed_bytes: Callable[[], int], trim: Callable[[], object]) -> None:
        self._freed_bytes, self._trim = freed_bytes, trim
        self._num_turns = self._usual_bytes = 0

    def give_back(self) -> bool:
        """Trims if it is worth it, and returns whether it did. Call it every few seconds.

        A trim takes some 3 ms for each 10 MiB, and other threads may wait for memory meanwhile.
        """
        freed_bytes = self._freed_bytes()
        self._num_turns += 1
        if self._num_turns <= _SETTLING_TURNS:
            self._usual_bytes = max(self._usual_bytes, freed_bytes)
            return False
        if freed_bytes < self._usual_bytes + _BURST_BYTES and self._num_turns < _LEARNT_TURNS:
            return False
        self._trim()
        self._num_turns = self._usual_bytes = 0
        return True


def freed_memory() -> FreedMemory:
    """Returns this process's freed memory. It is always 0 if the C library does not report it (glibc before 2.33, musl)."""
    try:
        linux.allocated_bytes()
    except OSError:
        return FreedMemory(lambda: 0, lambda: None)
    return FreedMemory(lambda: anonymous_bytes() - linux.allocated_bytes(), linux.malloc_trim)
