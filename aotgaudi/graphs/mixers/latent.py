"""Multi-head latent attention (DeepSeek V2 and V3, GLM 4 MoE Lite): a layer keeps one row a token, whatever its heads.

A row is the token's compressed keys and values, R numbers, then the rotated part of its key. transformers' modules expand
both to keys and values by heads in a method called ``expand_kv``. While we trace, that method hands them through, and
attention is *absorbed*: the key half of the expanding weight is multiplied with the queries, and the value half with what
they have collected. So all query heads attend to one KV head, whose values are the first R columns of its keys.

Legend of shape suffixes: see `base.py`; R rank of the latents, N and P unrotated and rotated columns of a query, D = R + P
columns of a row, V columns of a value, k keys of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aotgaudi.errors import SpecError
from aotgaudi.graphs.mixers.base import LayerCall, Masks, PagedState, mask_for, slots_of, with_context
from aotgaudi.graphs.paged_decode import MASKED, PAGED_DECODE


class LatentMixer:
    """Latent attention, absorbed."""

    def install(self, model: Any) -> None:
        """Makes every layer hand its latents to our attention function.

        Raises SpecError unless every layer has one attention module that expands latents in ``expand_kv``.
        """
        modules = [module for module in model.modules() if hasattr(module, "expand_kv")]
        num_layers = model.config.get_text_config().num_hidden_layers
        if len(modules) != num_layers or len({module.layer_idx for module in modules}) != num_layers:
            raise SpecError(
                "model.config.model_type",
                f"{model.config.model_type!r} has {len(modules)} latent attentions in {num_layers} layers",
                "use a model with one in each layer",
            )
        for module in modules:
            module.expand_kv = _handed_through

    def prompt_state(
        self, caches: Mapping[str, Tensor], inputs: Mapping[str, Tensor], masks: Masks
    ) -> PagedState:
        """Returns the state of a prompt step."""
        return LatentPromptState(caches, inputs["slots"], inputs.get("ctx_blocks"), masks)

    def decode_state(
        self, caches: Mapping[str, Tensor], inputs: Mapping[str, Tensor], masks: Masks
    ) -> PagedState:
        """Returns the state of a decode step."""
        return LatentDecodeState(caches, inputs["slots"], inputs["block_list"], inputs["block_rows"], masks)


def _handed_through(latents_11TR: Tensor, rotated_11TP: Tensor) -> tuple[Tensor, Tensor]:
    return latents_11TR, rotated_11TP


@dataclass(frozen=True)
class _Absorbed:
    """A layer's call with absorbed weights: q [H, T, D], the new rows [T, 1, D], the value half of the weight [H, V, R]."""

    q_HTD: Tensor
    rows_T1D: Tensor
    values_HVR: Tensor

    @classmethod
    def of(cls, call: LayerCall) -> _Absorbed:
        """Returns the absorbed call. Raises SpecError for a variant that absorption leaves out."""
        if call.softcap is not None or call.sinks_H is not None:
            raise SpecError(
                call.where, "latent attention with a softcap or sinks", "use another architecture"
            )
        latents_11TR, rotated_11TP = call.key, call.value
        rank, rotated = latents_11TR.shape[-1], rotated_11TP.shape[-1]
        query_HTX, unrotated = call.query[0], call.query.shape[-1] - rotated
        weight_HXR = call.module.kv_b_proj.weight.view(query_HTX.shape[0], -1, rank)
        absorbed_HTR = torch.bmm(query_HTX[..., :unrotated], weight_HXR[:, :unrotated])
        return cls(
            q_HTD=torch.cat([absorbed_HTR, query_HTX[..., unrotated:]], dim=-1),
            rows_T1D=torch.cat([latents_11TR[0], rotated_11TP[0]], dim=-1).transpose(0, 1),
            values_HVR=weight_HXR[:, unrotated:],
        )

    @property
    def rank(self) -> int:
        return self.values_HVR.shape[-1]

    def write(self, cache: Tensor, slots_T: Tensor) -> None:
        """Writes the new rows to their slots, in place."""
        blocks, offsets = slots_of(slots_T, cache.shape[3])
        cache[:, blocks, :, offsets] = self.rows_T1D[:, None]

    def values_of(self, collected_HTR: Tensor) -> Tensor:
        """Returns what heads have collected as values, [1, T, H, V]."""
        return torch.bmm(collected_HTR, self.values_HVR.transpose(1, 2)).transpose(0, 1)[None]


@dataclass
class LatentPromptState:
    """A prefill step of b rows, q new tokens each, after C cached tokens. `masks`: as in `uniform.PromptState`."""

    caches: Mapping[str, Tensor]
    slots_T: Tensor
    ctx_blocks_bc: Tensor | None
    masks: Masks

    def attend(self, call: LayerCall) -> Tensor:
        """Attends to cached context and to the new tokens themselves. Returns [1, T, H, V]."""
        cache, absorbed = self.caches[call.layer], _Absorbed.of(call)
        absorbed.write(cache, self.slots_T)
        mask_b1qk = mask_for(self.masks, call.sliding_window)
        b, q = mask_b1qk.shape[0], mask_b1qk.shape[2]
        keys_bkD = with_context(cache[0], absorbed.rows_T1D, self.ctx_blocks_bc, b)[:, 0]
        query_bHqD = absorbed.q_HTD.unflatten(1, (b, q)).transpose(0, 1)
        scores = torch.bmm(query_bHqD.flatten(1, 2), keys_bkD.transpose(1, 2)).unflatten(1, (-1, q))
        weights = torch.softmax(torch.where(mask_b1qk, scores.float() * call.scaling, MASKED), dim=-1)
        weights = torch.where(mask_b1qk, weights, 0.0).to(keys_bkD.dtype)
        collected = torch.bmm(weights.flatten(1, 2), keys_bkD[..., : absorbed.rank]).unflatten(1, (-1, q))
        return absorbed.values_of(collected.transpose(0, 1).flatten(1, 2))


@dataclass
class LatentDecodeState:
    """A decode step of b rows, flat over n blocks. `masks` maps a sliding window to [n, B]."""

    caches: Mapping[str, Tensor]
    slots_b: Tensor
    block_list_n: Tensor
    block_rows_n: Tensor
    masks: Masks

    def attend(self, call: LayerCall) -> Tensor:
        """Attends to the blocks of each row in place. Returns [1, b, H, V]."""
        cache, absorbed = self.caches[call.layer], _Absorbed.of(call)
        absorbed.write(cache, self.slots_b)
        collected_bHR: Tensor = PAGED_DECODE(
            absorbed.q_HTD.transpose(0, 1),
            cache,
            self.block_list_n,
            self.block_rows_n,
            mask_for(self.masks, call.sliding_window),
            None,
            call.scaling,
            0.0,
            absorbed.rank,
        )
        return absorbed.values_of(collected_bHR.transpose(0, 1))
