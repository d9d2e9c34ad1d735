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


def with_new_entries(
    mask_b1qk: Tensor, spans: Sequence[tuple[int, int]], num_ctx_blocks: int, per_block: int, every: int
) -> Tensor:
    """Returns a prompt's mask over tokens and entries, made from the one over tokens.

    Keys are each cached block's tokens, then its entries; after all blocks the new tokens, then the entries of the windows
    that the chunk may complete. A block has `per_block` entries, one for `every` tokens, seen from its last token on.
    `spans` are as in `prompt_mask`.
    """
    b, _, query_len, num_keys = mask_b1qk.shape
    starts_b111, numbers_b111 = torch.tensor(spans, dtype=torch.int64).T[:, :, None, None, None]
    new_q1 = torch.arange(query_len)[:, None]
    is_real = new_q1 < numbers_b111
    completed = starts_b111 // every + torch.arange(-(-query_len // every))
    seen_new = is_real & ((completed + 1) * every - 1 <= starts_b111 + new_q1)
    context, new_tokens = mask_b1qk.split([num_keys - query_len, query_len], dim=3)
    if not num_ctx_blocks:
        return torch.cat([new_tokens, seen_new], dim=3)
    seen = is_real & (torch.arange(num_ctx_blocks * per_block) < starts_b111 // every)
    shape = b, 1, query_len, num_ctx_blocks, -1
    blocks = torch.cat([context.reshape(shape), seen.reshape(shape)], dim=4)
    return torch.cat([blocks.flatten(3), new_tokens, seen_new], dim=3)
