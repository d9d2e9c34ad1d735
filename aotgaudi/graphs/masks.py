"""Attention masks of a step, made from lengths. The engine makes them for every step, in plain torch on small tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aotgaudi.graphs.step_inputs import Window


def prompt_mask(
    spans: Sequence[tuple[int, int]], query_len: int, num_ctx_tokens: int, window: Window
) -> Tensor:
    """Returns [b, 1, q, C + q]: the keys are C cached tokens, then q new ones.

    ``spans[r]`` is (start, number) of row r's new tokens; the tokens before `start` are cached. Padding sees nothing.
    """
    starts_b11, numbers_b11 = torch.tensor(spans, dtype=torch.int64).T[:, :, None, None]
    new = torch.arange(query_len)
    context = torch.arange(num_ctx_tokens)
    is_real = new[:, None] < numbers_b11
    seen_new = (new[None, :] <= new[:, None]) & is_real
    seen_context = (context < starts_b11) & is_real
    if window is not None:
        seen_new = seen_new & (new[None, :] > new[:, None] - window)
        seen_context = seen_context & (context > starts_b11 + new[:, None] - window)
    return torch.cat([seen_context, seen_new], dim=2)[:, None]


def decode_mask(num_seen: Sequence[int], block_size: int, num_hidden: Sequence[int] | None = None) -> Tensor:
    """Returns [n, B]: of block i, the first `num_seen[i]` tokens are visible, less its first `num_hidden[i]`."""
    offsets = torch.arange(block_size)
    mask = offsets < torch.tensor(num_seen, dtype=torch.int64)[:, None]
    if num_hidden is not None:
        mask &= offsets >= torch.tensor(num_hidden, dtype=torch.int64)[:, None]
    return mask
