"""The operator of decode attention over a paged cache: its definition. Each device has its own code for it.

Legend of shape suffixes: see `mixers/base.py`.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

MASKED = -1.0e30
"""The score of a hidden token: its exponential is 0."""


@torch.library.custom_op("aotgaudi::paged_decode", mutates_args=())
def paged_decode(  # noqa: PLR0913, PLR0917 - an operator's arguments
    query_bHD: Tensor,
    cache: Tensor,
    block_list_n: Tensor,
    block_rows_n: Tensor,
    seen_nB: Tensor,
    sinks_H: Optional[Tensor],
    scaling: float,
    softcap: float,
    value_dim: int = 0,
) -> Tensor:
    """Each row attends to its blocks of the cache ``[planes, num_blocks + 1, K, B, D]``. Returns [b, H, V].

    Keys lie in the first plane. Values are the first V = `value_dim` columns of the last plane (0: all D), so with one plane
    they are a part of the keys. Block n of `block_list_n` belongs to row ``block_rows_n[n]``; `seen_nB` says which of its
    B rows that row sees. A block with no visible row is padding. `softcap` 0 means no cap. Computed in float32, returned in
    the query's dtype. This is the reference: units run the device's code.
    """
    (b, heads, size), kv_heads = query_bHD.shape, cache.shape[2]
    size = value_dim or size
    keys_nKBD = cache[0].index_select(0, block_list_n).float()
    values_nKBV = cache[-1].index_select(0, block_list_n)[..., :size].float()
    query_nKGD = query_bHD.float().index_select(0, block_rows_n).unflatten(1, (kv_heads, heads // kv_heads))
    scores = torch.matmul(query_nKGD, keys_nKBD.transpose(2, 3)) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = torch.where(seen_nB[:, None, None, :], scores, MASKED)
    mine_bn = block_rows_n == torch.arange(b)[:, None]
    top_bKG = torch.where(mine_bn[:, :, None, None], scores.amax(-1), MASKED).amax(1)
    if sinks_H is not None:
        top_bKG = torch.maximum(top_bKG, sinks_H.float().view(1, kv_heads, -1))
    weights = torch.exp(scores - top_bKG.index_select(0, block_rows_n)[..., None]) * seen_nB[:, None, None, :]
    total_bH = torch.matmul(mine_bn.float(), weights.sum(-1).flatten(1))
    if sinks_H is not None:
        total_bH = total_bH + torch.exp(sinks_H.float() - top_bKG.view(b, heads))
    sums = torch.matmul(mine_bn.float(), torch.matmul(weights, values_nKBV).flatten(1)).view(b, heads, size)
    return (sums / total_bH.clamp_min(1e-30)[..., None]).to(query_bHD.dtype)


@paged_decode.register_fake
def _(query_bHD: Tensor, *others: object) -> Tensor:
    value_dim = others[7] if len(others) > 7 else 0
    if not isinstance(value_dim, int) or not value_dim:
        return torch.empty_like(query_bHD, memory_format=torch.contiguous_format)
    return query_bHD.new_empty(*query_bHD.shape[:2], value_dim)


PAGED_DECODE = torch.ops.aotgaudi.paged_decode.default
