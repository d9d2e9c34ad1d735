"""Attention over keys and values: every layer keeps both for each token, for each KV head.

Legend of shape suffixes: see `base.py`.

The cache of a layer is one tensor ``[2, num_blocks + 1, K, B, D]``, keys at 0 and values at 1. Head-major
blocks make the gathered keys of a block ready for a batched matrix product without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aotgaudi.errors import SpecError
from aotgaudi.graphs.mixers.base import LayerCall, Masks, PagedState, mask_for, slots_of, with_context
from aotgaudi.graphs.paged_decode import MASKED, PAGED_DECODE


@dataclass(frozen=True)
class AttentionCall:
    """One layer's call: q [T, H, D], k and v [T, K, D], the layer's cache, and the variant's options."""

    q_THD: Tensor
    k_TKD: Tensor
    v_TKD: Tensor
    cache: Tensor
    scaling: float
    sliding_window: int | None
    softcap: float | None
    sinks_H: Tensor | None

    @classmethod
    def of(cls, call: LayerCall, caches: Mapping[str, Tensor]) -> AttentionCall:
        """Returns the call over the layer's cache. Raises SpecError if its keys or values do not fit it."""
        cache, key, value = caches[call.layer], call.key, call.value
        if (key.shape[1], key.shape[3]) != (cache.shape[2], cache.shape[4]) or key.shape != value.shape:
            raise SpecError(
                call.where,
                f"keys {tuple(key.shape[1::2])} and values {tuple(value.shape[1::2])} (heads, head size) do not fit "
                f"the KV cache {(cache.shape[2], cache.shape[4])}",
                "layers with different KV heads are not supported",
            )
        return cls(
            q_THD=call.query[0].transpose(0, 1),
            k_TKD=key[0].transpose(0, 1),
            v_TKD=value[0].transpose(0, 1),
            cache=cache,
            scaling=call.scaling,
            sliding_window=call.sliding_window,
            softcap=call.softcap,
            sinks_H=call.sinks_H,
        )


def _write_cache(cache: Tensor, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
    """Writes T keys and values to their slots, in place."""
    blocks, offsets = slots_of(slots_T, cache.shape[3])
    cache[:, blocks, :, offsets] = torch.stack([k_TKD, v_TKD], dim=1)


@dataclass
class PromptState:
    """A prefill step of b rows, q new tokens each, after C = c * B tokens of cached context (maybe none).

    `masks` maps a sliding window (None: no window) to [b, 1, q, C + q], True where a query may look.
    """

    caches: Mapping[str, Tensor]
    slots_T: Tensor
    ctx_blocks_bc: Tensor | None
    masks: Masks

    def attend(self, layer_call: LayerCall) -> Tensor:
        """Writes the new rows, and attends to cached context and to the new tokens themselves. Returns [1, T, H, D]."""
        call = AttentionCall.of(layer_call, self.caches)
        _write_cache(call.cache, self.slots_T, call.k_TKD, call.v_TKD)
        mask = mask_for(self.masks, call.sliding_window)
        b, q = mask.shape[0], mask.shape[2]
        keys, values = (
            with_context(call.cache[i], new, self.ctx_blocks_bc, b)
            for i, new in ((0, call.k_TKD), (1, call.v_TKD))
        )
        query = call.q_THD.unflatten(0, (b, q)).transpose(1, 2)
        out_bHqD = _attend_dense(query, keys, values, mask, call)
        return out_bHqD.transpose(1, 2).reshape(1, b * q, *call.q_THD.shape[1:])


@dataclass
class DecodeState:
    """A decode step of b rows, flat over n blocks. `masks` maps a sliding window to [n, B]."""

    caches: Mapping[str, Tensor]
    slots_b: Tensor
    block_list_n: Tensor
    block_rows_n: Tensor
    masks: Masks

    def attend(self, layer_call: LayerCall) -> Tensor:
        """Writes the new rows, and attends to the blocks of each row in place. Returns [1, b, H, D]."""
        call = AttentionCall.of(layer_call, self.caches)
        _write_cache(call.cache, self.slots_b, call.k_TKD, call.v_TKD)
        out_bHD: Tensor = PAGED_DECODE(
            call.q_THD,
            call.cache,
            self.block_list_n,
            self.block_rows_n,
            mask_for(self.masks, call.sliding_window),
            call.sinks_H,
            call.scaling,
            call.softcap or 0.0,
        )
        return out_bHD[None]


class UniformMixer:
    """Attention over keys and values."""

    def install(self, model: Any) -> None:
        """Replaces nothing: the models' own modules call our attention function."""

    def prompt_state(
        self, caches: Mapping[str, Tensor], inputs: Mapping[str, Tensor], masks: Masks
    ) -> PagedState:
        """Returns the state of a prompt step."""
        return PromptState(caches, inputs["slots"], inputs.get("ctx_blocks"), masks)

    def decode_state(
        self, caches: Mapping[str, Tensor], inputs: Mapping[str, Tensor], masks: Masks
    ) -> PagedState:
        """Returns the state of a decode step."""
        return DecodeState(caches, inputs["slots"], inputs["block_list"], inputs["block_rows"], masks)


def _attend_dense(
    q_bHqD: Tensor, k_bKkD: Tensor, v_bKkD: Tensor, mask: Tensor, call: AttentionCall
) -> Tensor:
    """Returns [b, H, q, D]. Uses fused attention where the variant allows it, else a softmax written out."""
    if call.softcap is None and call.sinks_H is None:
        return F.scaled_dot_product_attention(
            q_bHqD, k_bKkD, v_bKkD, attn_mask=mask, scale=call.scaling, enable_gqa=True
        )
    groups = q_bHqD.shape[1] // k_bKkD.shape[1]
    keys, values = (x.repeat_interleave(groups, dim=1) for x in (k_bKkD, v_bKkD))
    scores = torch.matmul(q_bHqD, keys.transpose(2, 3)).float() * call.scaling
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = torch.where(mask, scores, MASKED)
    if call.sinks_H is not None:
        sinks = call.sinks_H.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[2]]
    return torch.matmul(weights.to(values.dtype), values)
