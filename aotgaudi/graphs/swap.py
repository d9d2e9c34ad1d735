"""The KV swap: exchanges pairs of blocks in one cache, in place."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SwapGraph(nn.Module):
    """cache [planes, num_blocks + 1, heads, rows a block, width], sources [n] and destinations [n] int64 -> the sources.

    A pair is exchanged, not copied, so a swap never loses content. Padding pairs are (0, 0). Only block 0 may
    occur twice. The graph has an output because a compiled graph must return something.
    """

    def forward(self, cache: Tensor, sources: Tensor, destinations: Tensor) -> Tensor:
        """Exchanges the blocks. One gather and one indexed write: two writes would copy the whole cache."""
        here, there = torch.cat([sources, destinations]), torch.cat([destinations, sources])
        cache.index_copy_(1, there, cache.index_select(1, here))
        return sources.clone()
