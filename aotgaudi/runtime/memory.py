"""Pages of our own: private, zeroed, and there before anybody writes to them where that is asked for. Imports no torch.

Keeps freed memory in the process, so that a step does not page-fault its buffers in anew; gives back what a burst left.

Units allocate their intermediate tensors on every call. By default, glibc returns buffers of some hundred kilobytes to
the kernel when they are freed, and the next call faults them in again: a decode step that takes 29 ms then takes
51 ms (docs/benchmarks.md). The working set of a serving process does not change, so it is kept; and in one arena,
because only the engine's thread allocates much. What does change is what clients make it hold: `FreedMemory` notices."""

from __future__ import annotations

import ctypes
import math
import mmap
import resource
from collections.abc import Callable, Iterable
from pathlib import Path
from string import ascii_lowercase

from aotgaudi.graphs.program import CacheSpec

_MADV_POPULATE_WRITE = 23
"""Of Linux 5.14; see madvise(2). Python's mmap has a method for it, which keeps all other threads waiting."""


def new_pages(num_bytes: int) -> memoryview:
    """Pages of our own. Not large ones: to find them costs a kernel with a full page cache more than they save here."""
    pages = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memoryview(pages)[:num_bytes]


def fault_in(pages: memoryview) -> None:
    """Has the kernel put a zeroed page behind each of `pages`, which are new; other threads go on meanwhile."""
    if not pages:
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if madvise(ctypes.addressof(ctypes.c_char.from_buffer(pages)), len(pages), _MADV_POPULATE_WRITE):
        pages[:: mmap.PAGESIZE] = bytes(-(-len(pages) // mmap.PAGESIZE))  # An older kernel.


def cache_memory(specs: Iterable[CacheSpec], num_blocks: int) -> dict[str, memoryview]:
    """Returns name -> zeroed memory for the KV caches of a server with `num_blocks` blocks, all of it there already.

    So a machine that is too small for them says so at the start, and no step waits for a page.
    """
    found = {spec.name: new_pages(_num_bytes(spec, num_blocks)) for spec in specs}
    for pages in found.values():
        fault_in(pages)
    return found


def _num_bytes(spec: CacheSpec, num_blocks: int) -> int:
    bits = int(spec.dtype.lstrip(ascii_lowercase))  # Every name of a dtype that caches have ends with them.
    return math.prod(spec.sizes(num_blocks)) * bits // 8


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_MMAP_THRESHOLD_BYTES = 32 << 20
"""What mallopt(3) allows; larger buffers are mapped and unmapped as before."""
_KEPT_BYTES = 1 << 30
_BURST_BYTES = 32 << 20
"""Freed memory that is worth a trim: the next step faults its own buffers in again, once."""
_SETTLING_TURNS = 2
_LEARNT_TURNS = 120


def keep_freed_memory() -> bool:
    """Tunes glibc's malloc for the whole process. Returns False where the C library has no ``mallopt``."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = (
        (_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD_BYTES),
        (_M_TRIM_THRESHOLD, _KEPT_BYTES),
        (_M_ARENA_MAX, 1),
    )
    return all(mallopt(name, value) == 1 for name, value in settings)


class FreedMemory:
    """Gives freed memory back when there is much more of it than usual.

    Freed memory is what is resident although nobody has allocated it. How much is usual (the buffers of a step, Python's
    own reserves) is seen in the turns after each trim, when the steps since have faulted theirs in again, and learnt anew
    after many turns. One thread only.

    Args:
        freed_bytes: Counts it.
        trim: Gives it back.
    """

    def __init__(self, freed_bytes: Callable[[], int], trim: Callable[[], object]) -> None:
        self._freed_bytes, self._trim = freed_bytes, trim
        self._num_turns = self._usual_bytes = 0

    def give_back(self) -> bool:
        """Trims if it is worth it; to be called every few seconds. Returns whether it was.

        A trim takes some 3 ms for each 10 MiB that go back, in which other threads may wait for memory.
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


class _Mallinfo2(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33; see mallinfo(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def freed_memory() -> FreedMemory:
    """Returns this process's; none is ever seen where the C library cannot say (before glibc 2.33, and musl)."""
    library = ctypes.CDLL(None)
    mallinfo2 = getattr(library, "mallinfo2", None)
    trim = getattr(library, "malloc_trim", None)
    if mallinfo2 is None or trim is None:
        return FreedMemory(lambda: 0, lambda: None)
    mallinfo2.restype, mallinfo2.argtypes = _Mallinfo2, ()
    trim.argtypes = (ctypes.c_size_t,)

    def freed_bytes() -> int:
        info = mallinfo2()
        return _anonymous_bytes() - int(info.uordblks + info.hblkhd)

    return FreedMemory(freed_bytes, lambda: trim(0))


def _anonymous_bytes() -> int:
    """Resident memory that no file backs; see proc(5), statm."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return (int(resident) - int(shared)) * resource.getpagesize()
