"""The pool of KV blocks: which block ids are free. Ids only; contents live on the device."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

PADDING_BLOCK = 0
"""Never handed out: padding reads from it and writes to it."""


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Returns how many blocks of `block_size` tokens hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class BlockPool:
    """Hands out block ids 1..`num_blocks`, lowest first, so that used ids stay packed at the low end.

    Not thread-safe: the engine's thread owns it. Misuse (taking more than is free, freeing twice, moving onto
    a used block) is a bug of the caller and raises ValueError before anything is changed.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(1, num_blocks + 1))  # A heap: ascending order is one.
        self._is_used = bytearray(num_blocks + 1)

    @property
    def num_free(self) -> int:
        """How many blocks can be allocated."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """How many blocks are handed out."""
        return self.num_blocks - len(self._free)

    @property
    def max_used(self) -> int:
        """The highest id in use; 0 when none is."""
        return max(self._is_used.rfind(1), 0)

    def used_ids(self) -> tuple[int, ...]:
        """Returns the ids in use, ascending."""
        return tuple(block for block, is_used in enumerate(self._is_used) if is_used)

    def can_allocate(self, count: int) -> bool:
        """Returns whether `count` blocks are free."""
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes the `count` lowest free ids, ascending. Raises ValueError when fewer are free."""
        if not self.can_allocate(count):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} of {self.num_blocks} are free")
        blocks = [heapq.heappop(self._free) for _ in range(count)]
        for block in blocks:
            self._is_used[block] = 1
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Gives blocks back. Raises ValueError when one is not in use, or is named twice."""
        blocks = list(blocks)
        self._require_used(blocks)
        for block in blocks:
            self._is_used[block] = 0
            heapq.heappush(self._free, block)

    def relocate(self, mapping: Mapping[int, int]) -> None:
        """Makes each source free and its destination used. Raises ValueError unless used -> free, 1 to 1."""
        self._require_used(list(mapping))
        taken = [block for block in mapping.values() if not self._is_free(block)]
        if taken or len(set(mapping.values())) != len(mapping):
            raise ValueError(
                f"blocks cannot move onto {taken or sorted(mapping.values())}: taken, or named twice"
            )
        for source, destination in mapping.items():
            self._is_used[source], self._is_used[destination] = 0, 1
        self._free = [block for block in range(1, self.num_blocks + 1) if not self._is_used[block]]

    def check_integrity(self) -> None:
        """Raises RuntimeError unless free and used ids partition 1..num_blocks."""
        expected = [block for block in range(1, self.num_blocks + 1) if not self._is_used[block]]
        if sorted(self._free) != expected or self._is_used[PADDING_BLOCK]:
            raise RuntimeError(f"the block pool is corrupt: free {sorted(self._free)}, expected {expected}")

    def _is_free(self, block: int) -> bool:
        return 1 <= block <= self.num_blocks and not self._is_used[block]

    def _require_used(self, blocks: list[int]) -> None:
        wrong = [block for block in blocks if not 1 <= block <= self.num_blocks or not self._is_used[block]]
        if wrong or len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {wrong or blocks} are not in use, or are named twice (a double free?)")
