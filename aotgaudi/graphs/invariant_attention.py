"""Paged attention in the batch-invariant form (`invariant.py`): prompts and decode steps do the same for each query.

Keys come in the blocks of the cache, also those of a prompt's own tokens. A query's scores with a block, the block's
part of its output and of its total are computed by loops whose sizes do not depend on the step; then the parts are
added up from the first block to the last. So it makes no difference whether a token was computed by a prompt or by a
decode step, in which chunk, after how many padded blocks, or beside whom: what a preempted request computes again is
what it had. The largest score, which is taken off before exponentials, is exact in any order.

Legend of shape suffixes: see `attention.py`; n blocks (a prompt's: c cached ones, then its own), X = D + 1: the part
of the output, then that of the total.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aotgaudi.graphs.attention import (
    MASKED,
    AttentionCall,
    DecodeState,
    PromptState,
    mask_for,
    softcapped,
    write_cache,
)
from aotgaudi.graphs.invariant import dot, row_sum, single, weighted


@dataclass
class InvariantPromptState(PromptState):
    """A prefill step."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Returns [1, T, H, D]."""
        write_cache(call.cache, self.slots_T, call.k_TKD, call.v_TKD)
        mask = mask_for(self.masks, call.sliding_window)
        b, q, heads = mask.shape[0], mask.shape[2], _heads(call)
        keys_bnKBD, values_bnKBD = (
            self._blocks(call.cache[i], new, b) for i, new in ((0, call.k_TKD), (1, call.v_TKD))
        )
        size = keys_bnKBD.shape[3]
        seen_bnqB = F.pad(mask[:, 0], (0, -q % size)).unflatten(2, (-1, size)).transpose(1, 2)
        query_bKGqD = call.q_THD.unflatten(0, (b, q)).unflatten(2, heads).permute(0, 2, 3, 1, 4)
        scores = _scores(query_bKGqD.flatten(2, 3)[:, None], keys_bnKBD, call).unflatten(3, (heads[1], q))
        scores = torch.where(seen_bnqB[:, :, None, None], scores, MASKED)
        top_bKGq = _with_sinks(scores.amax(-1).amax(1), call)
        weights = torch.exp(scores - top_bKGq[:, None, ..., None]).flatten(3, 4)
        parts_bnKMX = _parts(weights, values_bnKBD)
        sums = parts_bnKMX.flatten(2).sum(1).view(b, *heads, q, -1)
        out_bKGqD = _divided(sums, top_bKGq, call)
        return out_bKGqD.permute(0, 3, 1, 2, 4).reshape(1, b * q, *call.q_THD.shape[1:])

    def _blocks(self, cache_nKBD: Tensor, new_TKD: Tensor, b: int) -> Tensor:
        """Returns [b, n, K, B, D]: cached context, then the new tokens, the last block filled up with zeros."""
        size = cache_nKBD.shape[2]
        new_bqKD = new_TKD.unflatten(0, (b, -1))
        padded = F.pad(new_bqKD, (0, 0, 0, 0, 0, -new_bqKD.shape[1] % size))
        new_bnKBD: Tensor = padded.unflatten(1, (-1, size)).transpose(2, 3)
        if self.ctx_blocks_bc is None:
            return new_bnKBD
        cached = cache_nKBD.index_select(0, self.ctx_blocks_bc.flatten())
        return torch.cat([cached.unflatten(0, self.ctx_blocks_bc.shape), new_bnKBD], dim=1)


@dataclass
class InvariantDecodeState(DecodeState):
    """A decode step."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Returns [1, b, H, D]."""
        write_cache(call.cache, self.slots_b, call.k_TKD, call.v_TKD)
        seen_nB = mask_for(self.masks, call.sliding_window)
        keys_nKBD = call.cache[0].index_select(0, self.block_list_n)
        values_nKBD = call.cache[1].index_select(0, self.block_list_n)
        query_nKGD = call.q_THD.index_select(0, self.block_rows_n).unflatten(1, _heads(call))
        scores = torch.where(seen_nB[:, None, None, :], _scores(query_nKGD, keys_nKBD, call), MASKED)
        top_bKG = _with_sinks(self.row_max(scores.amax(-1)), call)
        weights = torch.exp(scores - top_bKG.index_select(0, self.block_rows_n)[..., None])
        parts_nKGX = _parts(weights, values_nKBD)
        mine = self.rows_bn[:, :, None]
        sums = torch.where(mine, parts_nKGX.flatten(1)[None], 0.0).sum(1).view(*top_bKG.shape, -1)
        return _divided(sums, top_bKG, call).reshape(call.q_THD.shape)[None]


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
        total = total + single(torch.exp, _sinks(call, top) - top)
    return (sums_X[..., :-1] / total.clamp_min(1e-30)[..., None]).to(call.q_THD.dtype)


def _sinks(call: AttentionCall, top: Tensor) -> Tensor:
    """The sinks of heads in the shape of `top`: [b, K, G] or [b, K, G, q]."""
    assert call.sinks_H is not None
    return call.sinks_H.float().view(1, *_heads(call), *[1] * (top.dim() - 3))
