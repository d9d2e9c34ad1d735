"""Decides which KV blocks a defragmentation moves. The runner moves the contents.

The algorithm is that of vllm-gaudi's online defragmenter. If the highest block id in use exceeds the number of blocks in use
by more than `threshold`, the highest used blocks are exchanged with the lowest free ones. Swap kernels are compiled for a
few numbers of pairs, so a plan is padded up to the next of these.

Defragmentation is useful if a decode reads the cache up to the highest block in use (contiguous attention), because it makes
the entries of decodes smaller. No step requires it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from aotgaudi.engine.blocks import BlockPool
from aotgaudi.engine.steps import DefragStep
from aotgaudi.entries import DefragEntry
from aotgaudi.errors import CoverageError
from aotgaudi.spec.scheduler import DefragSpec

Move = tuple[int, int]
"""(source, destination): a used block and the lower, free block that takes its contents."""


def plan_step(pool: BlockPool, spec: DefragSpec) -> DefragStep | None:
    """Returns the defragmentation that is due for the pool, or None."""
    if not spec.enabled or not should_defragment(pool.max_used, pool.num_used, spec.threshold):
        return None
    moves = plan_moves(pool.used_ids(), max(spec.padded_swaps))
    return DefragStep(DefragEntry(padded(len(moves), spec.padded_swaps)), moves) if moves else None


def should_defragment(max_used: int, num_used: int, threshold: int) -> bool:
    """Returns whether the highest used id is more than `threshold` above the number of used blocks."""
    return max_used - threshold > num_used


def plan_moves(used: Collection[int], limit: int) -> tuple[Move, ...]:
    """Returns moves that pair used ids, descending, with free ids, ascending from 1. Stops at `limit` or if free > used."""
    in_use = frozenset(used)
    highest_first = sorted(in_use, reverse=True)[:limit]
    free_ids = (block for block in range(1, max(in_use, default=0) + 2) if block not in in_use)
    return tuple(
        (source, free) for source, free in zip(highest_first, free_ids, strict=False) if free < source
    )


def padded(num_swaps: int, padded_swaps: Sequence[int]) -> int:
    """Returns the smallest of `padded_swaps` that is at least `num_swaps`. Raises CoverageError."""
    sizes = [size for size in padded_swaps if size >= num_swaps]
    if not sizes:
        raise CoverageError(f"no (defrag) entry covers {num_swaps} swaps; there are {sorted(padded_swaps)}")
    return min(sizes)
