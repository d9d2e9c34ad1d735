"""Attention over keys and values that lie apart, in flat slots: the form that Intel's bridge compiles without a fallback.

A layer has two caches, ``<layer>.k`` and ``<layer>.v``, each ``[(num_blocks + 1) * B, K, D]``. New rows are written by one
``index_copy_`` of the cache itself, which the bridge does in place (K-21 of docs/reference/hpu-contract.md). Masks, and
which block belongs to which row, are tensors that another unit has made on the device (`aotgaudi/graphs/hpu.py`).

Legend of shape suffixes: see `base.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from aotgaudi.errors import SpecError
from aotgaudi.graphs.attend_prompt import ATTEND_PROMPT
from aotgaudi.graphs.mixers.base import LayerCall, Masks, PagedState, mask_for
from aotgaudi.graphs.paged_decode import MASKED

ROWS = "rows"
"""Which block belongs to which row, ``[b, n]`` bool."""


@dataclass(frozen=True)
class SlotMixer:
    """Attention over flat slots, in blocks of `block_size`. `is_contiguous`: decodes read the cache's first blocks."""

    block_size: int
    is_contiguous: bool

    def install(self, model: Any) -> None:
        """Replaces nothing: the models' own modules call our attention function."""

    def prompt_state(
        self, caches: Mapping[str, Tensor], inputs: Mapping[str, Tensor], masks: Masks
    ) -> PagedState:
        """Returns the state of a prompt step."""
        return SlotPromptState(caches, inputs, masks, self.block_size)

    def decode_state(
        self, caches: Mapping[str, Tensor], inputs: Mapping[str, Tensor], masks: Masks
    ) -> PagedState:
        """Returns the state of a decode step."""
        blocks = None if self.is_contiguous else inputs["block_list"]
        return SlotDecodeState(caches, inputs["slots"], blocks, inputs[ROWS], masks, self.block_size)


@dataclass(frozen=True)
class _Written:
    """A layer's caches after the new rows were written, and its new queries, keys and values."""

    keys: Tensor
    values: Tensor
    q_THD: Tensor
    k_TKD: Tensor
    v_TKD: Tensor

    @classmethod
    def of(cls, call: LayerCall, caches: Mapping[str, Tensor], slots_T: Tensor) -> _Written:
        """Writes the new rows. Raises SpecError for a layer that does not fit its caches, or attends in another way."""
        if call.softcap is not None or call.sinks_H is not None:
            raise SpecError(
                call.where,
                "attention with a softcap or sinks is not built for hpu",
                "another model, or backend",
            )
        keys, values = caches[f"{call.layer}.k"], caches[f"{call.layer}.v"]
        if (call.key.shape[1], call.key.shape[3]) != tuple(
            keys.shape[1:]
        ) or call.key.shape != call.value.shape:
            raise SpecError(
                call.where,
                f"keys {tuple(call.key.shape[1::2])} and values {tuple(call.value.shape[1::2])} (heads, head size) do"
                f" not fit the KV cache {tuple(keys.shape[1:])}",
                "layers with different KV heads are not supported",
            )
        q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1).contiguous() for x in (call.query, call.key, call.value))
        keys.index_copy_(0, slots_T, k_TKD)
        values.index_copy_(0, slots_T, v_TKD)
        return cls(keys, values, q_THD, k_TKD, v_TKD)


@dataclass
class SlotPromptState:
    """A prefill step. `masks` maps a sliding window to a bias ``[b, 1, q, C + q]``, or to None: causal, by lengths."""

    caches: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    masks: Masks
    block_size: int

    def attend(self, call: LayerCall) -> Tensor:
        """Attends to cached context and to the new tokens themselves. Returns [1, T, H, D]."""
        new = _Written.of(call, self.caches, self.inputs["slots"])
        bias = mask_for(self.masks, call.sliding_window)
        b = self.inputs["logits_indices"].shape[0]
        keys, values = (
            self._with_context(cache, rows, b)
            for cache, rows in ((new.keys, new.k_TKD), (new.values, new.v_TKD))
        )
        query = new.q_THD.unflatten(0, (b, -1)).transpose(1, 2)
        lengths = query.shape[2] - self.inputs["num_padding"] if bias is None else None
        out_bHqD: Tensor = ATTEND_PROMPT(query, keys, values, bias, lengths, call.scaling)
        return out_bHqD.transpose(1, 2).reshape(1, *new.q_THD.shape)

    def _with_context(self, cache: Tensor, new_TKD: Tensor, b: int) -> Tensor:
        """Returns [b, K, C + q, D]: what the cache has for the rows' context blocks, then the new tokens'."""
        new_bqKD: Tensor = new_TKD.unflatten(0, (b, -1))
        blocks_bc = self.inputs.get("ctx_blocks")
        if blocks_bc is None:
            return new_bqKD.transpose(1, 2)
        gathered = cache.unflatten(0, (-1, self.block_size)).index_select(0, blocks_bc.flatten())
        context = gathered.unflatten(0, (b, -1)).flatten(1, 2)
        return torch.cat([context, new_bqKD], dim=1).transpose(1, 2)


@dataclass
class SlotDecodeState:
    """A decode step, flat over n blocks: those of `block_list_n`; None: the cache's first ones after the padding block.

    `masks` maps a sliding window to which tokens of a block its row sees, ``[n, B]``.
    """

    caches: Mapping[str, Tensor]
    slots_b: Tensor
    block_list_n: Optional[Tensor]
    rows_bn: Tensor
    masks: Masks
    block_size: int

    def attend(self, call: LayerCall) -> Tensor:
        """Attends to the blocks of each row. Returns [1, b, H, D].

        Queries go to their blocks, and what they collect there comes back, by products with `rows_bn`, so nothing of a row
        is gathered. Scores and sums are float32.
        """
        new = _Written.of(call, self.caches, self.slots_b)
        seen_n11B = mask_for(self.masks, call.sliding_window)[:, None, None, :]
        keys_nKBD, values_nKBD = self._blocks(new.keys), self._blocks(new.values)
        (b, heads, size), kv_heads = new.q_THD.shape, keys_nKBD.shape[1]
        mine_bn = self.rows_bn.to(new.q_THD.dtype)
        query_nX = torch.matmul(mine_bn.t(), new.q_THD.flatten(1))
        query_nKGD = query_nX.view(-1, kv_heads, heads // kv_heads, size)
        scores = torch.matmul(query_nKGD, keys_nKBD.transpose(2, 3)).float() * call.scaling
        scores = torch.where(seen_n11B, scores, MASKED)
        mine_bn = mine_bn.float()
        top_bKG = torch.where(self.rows_bn[:, :, None, None], scores.amax(-1), MASKED).amax(1)
        top_nKG = torch.matmul(mine_bn.t(), top_bKG.flatten(1)).view(-1, kv_heads, heads // kv_heads)
        weights = torch.exp(scores - top_nKG[..., None])
        parts_nX = torch.matmul(weights.to(values_nKBD.dtype), values_nKBD).float().flatten(1)
        sums_bHD = torch.matmul(mine_bn, parts_nX).view(b, heads, size)
        total_bH = torch.matmul(mine_bn, weights.sum(-1).flatten(1))
        return (sums_bHD / total_bH.clamp_min(1e-30)[..., None]).to(new.q_THD.dtype)[None]

    def _blocks(self, cache: Tensor) -> Tensor:
        """Returns the blocks that are read, [n, K, B, D]."""
        size, n = self.block_size, self.rows_bn.shape[1]
        if self.block_list_n is None:
            blocks: Tensor = cache[size : (n + 1) * size].unflatten(0, (n, size))
        else:
            blocks = cache.unflatten(0, (-1, size)).index_select(0, self.block_list_n)
        return blocks.transpose(1, 2)
