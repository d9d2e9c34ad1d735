"""Keeps freed memory in the process, so that a step does not page-fault its buffers in anew; gives back what a burst left.

Units allocate their intermediate tensors on every call. By default, glibc returns buffers of some hundred kilobytes to
the kernel when they are freed, and the next call faults them in again: a decode step that takes 29 ms then takes
51 ms (docs/benchmarks.md). The working set of a serving process does not change, so it is kept; and in one arena,
because only the engine's thread allocates much. What does change is what clients make it hold: `FreedMemory` notices.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable
from pathlib import Path

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
