"""Whether a model fits on a card: one rule for a server's start and for ``doctor --hpu --fit``. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from aotgaudi.backends.base import Room
from aotgaudi.errors import TargetError

RESERVED_SHARE = 0.1
"""Of the card's memory, for recipes and their workspaces (vLLM for Gaudi keeps as much for graphs). Not measured by us."""


@dataclass(frozen=True, slots=True)
class CardRoom:
    """What is free of a card's bytes, and what a server needs of them."""

    free_bytes: int
    total_bytes: int
    room: Room

    def require(self) -> None:
        """Raises TargetError, with the figures, where weights and KV caches do not fit."""
        if self._cache_bytes > self._left:
            raise TargetError(f"target: the model does not fit on the card: {self}")

    def require_headroom(self) -> None:
        """Raises TargetError where the programs, which have all run, left less than a quarter of what is reserved."""
        wanted = self._reserved // 4
        if self.free_bytes >= wanted:
            return
        left = self.free_bytes - wanted + self._cache_bytes
        raise TargetError(
            f"target: after every program has run, {self._free()}, fewer than {_mib(wanted)}; {self._taken()};"
            f" {self._fitting(left)}"
        )

    def __str__(self) -> str:
        """Returns the four figures, and the most blocks that fit."""
        return (
            f"{self._free()}; {self._taken()}, and {_mib(self._reserved)} are reserved for recipes and workspaces;"
            f" {self._fitting(self._left)}"
        )

    @property
    def _reserved(self) -> int:
        return int(self.total_bytes * RESERVED_SHARE)

    @property
    def _cache_bytes(self) -> int:
        return self.room.block_bytes * (self.room.num_blocks + 1)

    @property
    def _left(self) -> int:
        return self.free_bytes - self.room.weights_bytes - self._reserved

    def _free(self) -> str:
        return f"{_mib(self.free_bytes)} of {_mib(self.total_bytes)} MiB are free"

    def _taken(self) -> str:
        return (
            f"weights take {_mib(self.room.weights_bytes)}, {self.room.num_blocks:,} KV blocks"
            f" {_mib(self._cache_bytes)}"
        )

    def _fitting(self, left: int) -> str:
        most = left // self.room.block_bytes - 1
        return (
            f"limits.num_blocks may be {most:,} at most" if most > 0 else "no number of KV blocks would fit"
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f}"
