"""Hidden states of a prompt step -> one vector a row: the last unit of a pooling model, after its final norm.

Only the row's own tokens count. The server adds up the chunks of a prompt, and then divides and normalizes
(engine/pooling.py). Legend: b rows, q tokens a row with padding, X hidden size, T = b * q.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aotgaudi.spec.pooler import PoolingType


def pooled(hidden_TX: Tensor, inputs: Mapping[str, Tensor], kind: PoolingType, block_size: int) -> Tensor:
    """Returns [b, X] float32: of each row the last token's state, the sum over its tokens, or the state at position 0.

    Where position 0 is not among a row's tokens, CLS gives zeros.
    """
    last_b = inputs["logits_indices"]
    if kind == "LAST":
        return hidden_TX.index_select(0, last_b).float()
    counts_T = inputs["slots"] >= block_size  # Padding is written to block 0.
    if kind == "CLS":
        counts_T = counts_T & (inputs["positions"] == 0)
    counted_TX = torch.where(counts_T[:, None], hidden_TX.float(), 0.0)
    return counted_TX.view(last_b.shape[0], -1, hidden_TX.shape[-1]).sum(1)
