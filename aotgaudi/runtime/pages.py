"""Pages of our own: private, zeroed, and there before anybody writes to them where that is asked for. Imports no torch."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterable
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
