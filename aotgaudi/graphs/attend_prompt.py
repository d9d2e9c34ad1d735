"""The operator of attention in prompts, for devices that have fused attention of their own: its definition.

A text that names it does not change with the vendor's signature. The device's backend replaces it before it compiles
(`aotgaudi/backends/hpu/frontend.py`).

Legend of shape suffixes: see `mixers/base.py`; k keys of a row.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from aotgaudi.graphs.paged_decode import MASKED


def attend_written_out(
    query_bHqD: Tensor,
    keys_bKkD: Tensor,
    values_bKkD: Tensor,
    bias_b1qk: Optional[Tensor],
    lengths_b: Optional[Tensor],
    scaling: float,
) -> Tensor:
    """Returns [b, H, q, D]: each query's attention to the keys of its row.

    With a bias, it is added to the scores. Without one there are as many keys as queries; a query sees the keys up to its
    own place, of the first `lengths_b` of its row, and queries beyond these get 0.
    """
    (b, heads, q, _), (_, kv_heads, k, size) = query_bHqD.shape, values_bKkD.shape
    query_bKRD = query_bHqD.reshape(b, kv_heads, heads // kv_heads * q, -1)
    scores = (torch.matmul(query_bKRD, keys_bKkD.transpose(2, 3)).float() * scaling).view(b, heads, q, k)
    if bias_b1qk is not None:
        scores = scores + bias_b1qk.float()
    else:
        places_k = torch.arange(k, device=query_bHqD.device)
        seen = places_k <= torch.arange(q, device=query_bHqD.device)[:, None]
        if lengths_b is not None:
            seen = seen & (places_k < lengths_b[:, None, None, None])
        scores = torch.where(seen, scores, MASKED)
    weights = torch.softmax(scores, dim=-1).to(values_bKkD.dtype).view(b, kv_heads, heads // kv_heads * q, k)
    out_bHqD = torch.matmul(weights, values_bKkD).view(b, heads, q, size)
    return out_bHqD if bias_b1qk is not None else without_padding(out_bHqD, lengths_b)


def without_padding(out_bHqD: Tensor, lengths_b: Optional[Tensor]) -> Tensor:
    """Returns the outputs of queries, 0 beyond the lengths, whatever is there."""
    if lengths_b is None:
        return out_bHqD
    places_q1 = torch.arange(out_bHqD.shape[2], device=out_bHqD.device)[:, None]
    return torch.where(places_q1 < lengths_b[:, None, None, None], out_bHqD, 0.0)


attend_prompt = torch.library.custom_op("aotgaudi::attend_prompt", attend_written_out, mutates_args=())


@attend_prompt.register_fake
def _(query_bHqD: Tensor, keys_bKkD: Tensor, values_bKkD: Tensor, *_: object) -> Tensor:
    del keys_bKkD
    return query_bHqD.new_empty(*query_bHqD.shape[:3], values_bKkD.shape[3])


ATTEND_PROMPT = torch.ops.aotgaudi.attend_prompt.default
