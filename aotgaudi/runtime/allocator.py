"""Keeps freed memory in the process, so that a step does not page-fault its buffers in anew.

Units allocate their intermediate tensors on every call. By default, glibc returns buffers of some hundred kilobytes to
the kernel when they are freed, and the next call faults them in again: a decode step that takes 29 ms then takes
51 ms (docs/benchmarks.md). The working set of a serving process does not change, so it is kept; and in one arena,
because only the engine's thread allocates much.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_MMAP_THRESHOLD_BYTES = 32 << 20
"""What mallopt(3) allows; larger buffers are mapped and unmapped as before."""
_KEPT_BYTES = 1 << 30


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
