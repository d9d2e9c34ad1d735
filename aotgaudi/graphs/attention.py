"""Our paged attention, registered with transformers as an attention function.

transformers' models call the function below once per layer, with queries and keys after rope and KV heads not
repeated. They pass every keyword of ``model(...)`` through unchanged, so the paged state of the step travels as the
keyword ``paged``. No mask function is registered under our name, so the models add no mask operations to the graph.

Legend of shape suffixes: T tokens, b rows, q new tokens a row, n blocks, B block size, C cached tokens a
row (c * B), H query heads, K KV heads, G query heads a KV head, D head size.

The cache of a layer is one tensor ``[2, num_blocks + 1, K, B, D]``, keys at 0 and values at 1. Head-major
blocks make the gathered keys of a block ready for a batched matrix product without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from aotgaudi.errors import SpecError
from aotgaudi.graphs.paged_decode import MASKED, PAGED_DECODE

ATTENTION_NAME = "aotgaudi_paged"

IGNORED_KWARGS = frozenset({"position_ids", "use_cache", "output_router_logits", "dropout", "cache_position"})
"""Keywords that paged attention does not need: positions and the cache come from `paged`, dropout is 0 in
inference, and router logits do not concern attention."""


class PagedState(Protocol):
    """The step's state, for the attention of every layer."""

    caches: Mapping[str, Tensor]

    def attend(self, call: AttentionCall) -> Tensor:
        """Writes the new keys and values, and attends. Returns [1, T, H, D]."""
        ...


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


def paged_attention(  # noqa: PLR0913 - the signature is transformers' own
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    paged: PagedState,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for ``AttentionInterface``: q [1, H, T, D], k and v [1, K, T, D] -> [1, T, H, D].

    Raises SpecError for an unknown keyword: dropping one would be silently wrong.
    """
    unknown = sorted(set(kwargs) - IGNORED_KWARGS)
    where = f"model ({type(module).__name__}, layer {module.layer_idx})"
    if unknown:
        raise SpecError(
            where, f"attention keyword {unknown[0]!r} is not supported", "use another architecture"
        )
    if attention_mask is not None:
        raise SpecError(where, "the model builds its own attention mask", "use another architecture")
    cache = paged.caches[str(module.layer_idx)]
    if (key.shape[1], key.shape[3]) != (cache.shape[2], cache.shape[4]) or key.shape != value.shape:
        raise SpecError(
            where,
            f"keys {tuple(key.shape[1::2])} and values {tuple(value.shape[1::2])} (heads, head size) do not fit "
            f"the KV cache {(cache.shape[2], cache.shape[4])}",
            "layers with different or latent KV heads are not supported",
        )
    call = AttentionCall(
        q_THD=query[0].transpose(0, 1),
        k_TKD=key[0].transpose(0, 1),
        v_TKD=value[0].transpose(0, 1),
        cache=cache,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks_H=s_aux,
    )
    return paged.attend(call), None


def write_cache(cache: Tensor, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
    """Writes T keys and values to their slots (``block * B + offset``), in place.

    It is one indexed write to the input itself. A write through a view (``cache[0][...] = k``) would make the
    compiled graph copy the whole cache on every call.
    """
    block_size = cache.shape[3]
    blocks, offsets = slots_T // block_size, slots_T % block_size
    cache[:, blocks, :, offsets] = torch.stack([k_TKD, v_TKD], dim=1)


@dataclass
class PromptState:
    """A prefill step of b rows, q new tokens each, after C = c * B tokens of cached context (maybe none).

    `masks` maps a sliding window (None: no window) to [b, 1, q, C + q], True where a query may look.
    """

    caches: Mapping[str, Tensor]
    slots_T: Tensor
    ctx_blocks_bc: Tensor | None
    masks: dict[int | None, Tensor]

    def attend(self, call: AttentionCall) -> Tensor:
        """Attends to cached context and to the new tokens themselves. Returns [1, T, H, D]."""
        write_cache(call.cache, self.slots_T, call.k_TKD, call.v_TKD)
        mask = mask_for(self.masks, call.sliding_window)
        b, q = mask.shape[0], mask.shape[2]
        keys, values = (
            self._with_context(call.cache[i], new, b) for i, new in ((0, call.k_TKD), (1, call.v_TKD))
        )
        query = call.q_THD.unflatten(0, (b, q)).transpose(1, 2)
        out_bHqD = _attend_dense(query, keys, values, mask, call)
        return out_bHqD.transpose(1, 2).reshape(1, b * q, *call.q_THD.shape[1:])

    def _with_context(self, cache_nKBD: Tensor, new_TKD: Tensor, b: int) -> Tensor:
        """Returns [b, K, C + q, D]: cached context, then the new tokens."""
        new_bKqD: Tensor = new_TKD.unflatten(0, (b, -1)).transpose(1, 2)
        if self.ctx_blocks_bc is None:
            return new_bKqD
        c = self.ctx_blocks_bc.shape[1]
        gathered = cache_nKBD.index_select(0, self.ctx_blocks_bc.flatten()).unflatten(0, (b, c))
        return torch.cat([gathered.transpose(1, 2).flatten(2, 3), new_bKqD], dim=2)


@dataclass
class DecodeState:
    """A decode step of b rows, flat over n blocks. `masks` maps a sliding window to [n, B]."""

    caches: Mapping[str, Tensor]
    slots_b: Tensor
    block_list_n: Tensor
    block_rows_n: Tensor
    masks: dict[int | None, Tensor]

    def attend(self, call: AttentionCall) -> Tensor:
        """Attends to the blocks of each row in place. Returns [1, b, H, D]."""
        write_cache(call.cache, self.slots_b, call.k_TKD, call.v_TKD)
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


def mask_for(masks: dict[int | None, Tensor], window: int | None) -> Tensor:
    """Returns the mask of a window. Raises SpecError for a window that the configuration does not name."""
    if window not in masks:
        raise SpecError(
            "model",
            f"a layer has the sliding window {window}",
            f"the configuration names {sorted(map(str, masks))}",
        )
    return masks[window]


def softcapped(scores: Tensor, softcap: float | None) -> Tensor:
    """Returns scores within ``-softcap`` and ``softcap``; with None, unchanged."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


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
    scores = torch.where(mask, softcapped(scores, call.softcap), MASKED)
    if call.sinks_H is not None:
        sinks = call.sinks_H.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[2]]
    return torch.matmul(weights.to(values.dtype), values)
