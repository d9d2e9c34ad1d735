"""Paged attention in the batch-invariant form (`invariant.py`): prompts and decode steps do the same for each query.

Keys and values are read from the blocks of the cache, also those of a prompt's own tokens. A query's scores with a
block, and the block's part of its output and of its total, are computed by loops whose sizes do not depend on the step;
then the parts are added up from the first block to the last. So it makes no difference whether a token was computed by a
prompt or by a decode step, in which chunk, after how many padded blocks, or beside whom: what a preempted request
computes again is what it had. The largest score, which is taken off before exponentials, is exact in any order.

Legend of shape suffixes: see `attention.py`; n blocks (a prompt row's: c of cached context, then its own), X = D + 1:
the part of the output, then that of the total.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aotgaudi.graphs.attention import (
    AttentionCall,
    DecodeState,
    PromptState,
    mask_for,
    softcapped,
    write_cache,
)
from aotgaudi.graphs.invariant import dot, exp, row_sum, weighted
from aotgaudi.graphs.paged_decode import MASKED


@dataclass
class InvariantPromptState(PromptState):
    """A prefill step."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Returns [1, T, H, D]."""
        _write(call, self.slots_T)
        mask = mask_for(self.masks, call.sliding_window)
        b, q, heads = mask.shape[0], mask.shape[2], _heads(call)
        size = call.cache.shape[3]
        blocks_bn = self._blocks(b, size)
        keys_bnKBD, values_bnKBD = (
            call.cache[i].index_select(0, blocks_bn.flatten()).unflatten(0, blocks_bn.shape) for i in (0, 1)
        )
        seen_bnqB = F.pad(mask[:, 0], (0, -q % size)).unflatten(2, (-1, size)).transpose(1, 2)
        query_bKGqD = call.q_THD.unflatten(0, (b, q)).unflatten(2, heads).permute(0, 2, 3, 1, 4)
        scores = _scores(query_bKGqD.flatten(2, 3)[:, None], keys_bnKBD, call).unflatten(3, (heads[1], q))
        scores = torch.where(seen_bnqB[:, :, None, None], scores, MASKED)
        top_bKGq = _with_sinks(scores.amax(-1).amax(1), call)
        weights = exp(scores - top_bKGq[:, None, ..., None]).flatten(3, 4)
        parts_bnKMX = _parts(weights, values_bnKBD)
        sums = parts_bnKMX.flatten(2).sum(1).view(b, *heads, q, -1)
        out_bKGqD = _divided(sums, top_bKGq, call)
        return out_bKGqD.permute(0, 3, 1, 2, 4).reshape(1, b * q, *call.q_THD.shape[1:])

    def _blocks(self, b: int, block_size: int) -> Tensor:
        """Returns the ids of the blocks, [b, n]: of cached context, then those that the new tokens were written to."""
        own_bn = self.slots_T.unflatten(0, (b, -1))[:, ::block_size] // block_size
        return own_bn if self.ctx_blocks_bc is None else torch.cat([self.ctx_blocks_bc, own_bn], dim=1)


@dataclass
class InvariantDecodeState(DecodeState):
    """A decode step. `rows_bn` is True where block n belongs to row b."""

    rows_bn: Tensor

    def attend(self, call: AttentionCall) -> Tensor:
        """Returns [1, b, H, D]."""
        _write(call, self.slots_b)
        seen_nB = mask_for(self.masks, call.sliding_window)
        keys_nKBD = call.cache[0].index_select(0, self.block_list_n)
        values_nKBD = call.cache[1].index_select(0, self.block_list_n)
        query_nKGD = call.q_THD.index_select(0, self.block_rows_n).unflatten(1, _heads(call))
        scores = torch.where(seen_nB[:, None, None, :], _scores(query_nKGD, keys_nKBD, call), MASKED)
        top_bKG = _with_sinks(self._row_max(scores.amax(-1)), call)
        weights = exp(scores - top_bKG.index_select(0, self.block_rows_n)[..., None])
        parts_nKGX = _parts(weights, values_nKBD)
        mine = self.rows_bn[:, :, None]
        sums = torch.where(mine, parts_nKGX.flatten(1)[None], 0.0).sum(1).view(*top_bKG.shape, -1)
        return _divided(sums, top_bKG, call).reshape(call.q_THD.shape)[None]

    def _row_max(self, x_nKG: Tensor) -> Tensor:
        """Returns the largest of each row's blocks, [b, K, G]."""
        mine = self.rows_bn[:, :, None, None]
        return torch.where(mine, x_nKG[None], MASKED).amax(1)


def _write(call: AttentionCall, slots: Tensor) -> None:
    dtype = call.cache.dtype
    write_cache(call.cache, slots, call.k_TKD.to(dtype), call.v_TKD.to(dtype))


def _heads(call: AttentionCall) -> tuple[int, int]:
    """KV heads, and query heads of each."""
    kv_heads = call.k_TKD.shape[1]
    return kv_heads, call.q_THD.shape[1] // kv_heads


def _scores(query: Tensor, keys: Tensor, call: AttentionCall) -> Tensor:
    return softcapped(dot(query, keys) * call.scaling, call.softcap)


def _with_sinks(top: Tensor, call: AttentionCall) -> Tensor:
    return top if call.sinks_H is None else torch.maximum(top, _sinks(call, top))


def _parts(weights: Tensor, values: Tensor) -> Tensor:
    """Returns what each block adds: [..., D] of the output and one number of the total."""
    return torch.cat([weighted(weights, values), row_sum(weights)[..., None]], dim=-1)


def _divided(sums_X: Tensor, top: Tensor, call: AttentionCall) -> Tensor:
    total = sums_X[..., -1]
    if call.sinks_H is not None:
        total = total + exp(_sinks(call, top) - top)
    return sums_X[..., :-1] / total.clamp_min(1e-30)[..., None]


def _sinks(call: AttentionCall, top: Tensor) -> Tensor:
    """The sinks of heads in the shape of `top`: [b, K, G] or [b, K, G, q]."""
    assert call.sinks_H is not None
    return call.sinks_H.float().view(1, *_heads(call), *[1] * (top.dim() - 3))
