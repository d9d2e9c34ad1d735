"""Whether a server fits on a card: one rule for its start and for ``doctor --hpu --fit``. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from aotgaudi.errors import TargetError
from aotgaudi.machine import Memory
from aotgaudi.manifest.memory import MemoryNeed, sized

RESERVED_SHARE = 0.1
"""Of the card's memory, for recipes and their workspaces (vLLM for Gaudi keeps as much for graphs). Not measured by us."""


def on_card(need: MemoryNeed, card: Memory) -> MemoryNeed:
    """Returns what a server needs of a card, with what is reserved there."""
    reserved_bytes = int(card.total_bytes * RESERVED_SHARE)
    return replace(need, reserved_bytes=reserved_bytes, reserved_for="recipes and workspaces")


def require_headroom(need: MemoryNeed, card: Memory) -> None:
    """Raises TargetError where the programs, which have all run, left less than a quarter of what is reserved."""
    wanted = on_card(need, card).reserved_bytes // 4
    if card.free_bytes < wanted:
        fitting = need.cache.blocks_in(card.free_bytes - wanted + need.cache_bytes)
        raise TargetError(
            f"target: after every program has run, {sized(card.free_bytes)} of {sized(card.total_bytes)} are free, fewer"
            f" than {sized(wanted)}; weights take {sized(need.weights_bytes)}, {need.num_blocks:,} KV blocks"
            f" {sized(need.cache_bytes)}; {need.remedy(fitting)}"
        )
