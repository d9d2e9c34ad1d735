"""The inputs by which a step of compressed attention makes cache entries for windows of tokens (graphs/step_inputs.py).

They are computed from lengths and block tables. A window of r tokens, aligned to the beginning of the sequence, is
completed by the step that computes its last token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aotgaudi.engine.sampler import to_ids
from aotgaudi.graphs.program import TensorSpec

Chunk = tuple[int, int, Sequence[int]]
"""A row's new tokens: the position of the first, their number, and the block table."""


class CompletedWindows:
    """The windows of `every` tokens that a step completes. Each of b rows has w candidates, the first it may complete."""

    def __init__(self, chunks: Sequence[Chunk], num_candidates: int, every: int, block_size: int) -> None:
        self._chunks, self._every, self._block_size = chunks, every, block_size
        starts = to_ids([start for start, _, _ in chunks])[:, None]
        ends = to_ids([start + number for start, number, _ in chunks])[:, None]
        self._numbers = starts // every + torch.arange(num_candidates)
        self._is_completed = self._numbers < ends // every

    def tensor(self, kind: str, spec: TensorSpec) -> Tensor:
        """Returns the input of this kind."""
        if kind == "windows_seen":
            return self._read(spec.shape[2])[1]
        if kind == "windows":
            positions, is_seen = self._read(spec.shape[2])
            return torch.where(is_seen, self._slots(positions, 1), 0)
        positions = torch.where(self._is_completed, self._numbers * self._every, 0)
        if kind == "entry_positions":
            return positions.flatten()
        padding = torch.arange(positions.shape[1]) % (self._block_size // self._every)
        return torch.where(self._is_completed, self._slots(positions, self._every), padding).flatten()

    def _read(self, size: int) -> tuple[Tensor, Tensor]:
        """Returns the positions that each window reads, and which of them exist in a completed window, both [b, w, S]."""
        ends = ((self._numbers + 1) * self._every)[..., None]
        positions = ends - size + torch.arange(size)
        return positions, self._is_completed[..., None] & (positions >= 0)

    def _slots(self, positions: Tensor, every: int) -> Tensor:
        """Returns ``block * (B / every) + offset`` for positions in each row. Values for positions outside are arbitrary."""
        slots, size = torch.zeros_like(positions), self._block_size
        for row, (_, _, table) in enumerate(self._chunks):
            if not self._is_completed[row, 0]:
                continue
            mine = positions[row].clamp_min(0)
            first = int(mine.min()) // size
            blocks = to_ids(table[first : int(mine.max()) // size + 1])
            numbers = (mine // size - first).clamp_max(len(blocks) - 1)
            slots[row] = blocks[numbers] * (size // every) + mine % size // every
        return slots
