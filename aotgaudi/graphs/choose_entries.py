"""The operator that chooses among compressed entries: its definition. Each device has its own code for it.

Scores are sums of rectified products, so many are exactly zero, and equal scores are common. Which of them ``topk`` takes
depends on the length of its input. Here the oldest are taken, so a choice depends on the entries alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("aotgaudi::choose_entries", mutates_args=())
def choose_entries(scores: Tensor, seen: Tensor, k: int) -> Tensor:
    """Returns which entries of the last dimension are chosen: of those seen the `k` largest, of equal ones the first.

    `scores` float32 and `seen` bool have one shape, with entries from the oldest to the newest. NaN is larger than all.
    """
    order = entries_by_rank(scores, seen)
    chosen = torch.zeros_like(seen).scatter(-1, order[..., :k], value=True)
    return chosen & seen


def entries_by_rank(scores: Tensor, seen: Tensor) -> Tensor:
    """Returns the numbers of the entries in the order in which they are chosen; those that are not seen come last."""
    largest_first = scores.sort(dim=-1, descending=True, stable=True).indices
    seen_first = seen.gather(-1, largest_first).to(torch.uint8).sort(dim=-1, descending=True, stable=True)
    return largest_first.gather(-1, seen_first.indices)


@choose_entries.register_fake
def _(scores: Tensor, seen: Tensor, k: int) -> Tensor:
    return torch.empty_like(seen, memory_format=torch.contiguous_format)


CHOOSE_ENTRIES = torch.ops.aotgaudi.choose_entries.default
