"""What a mixer is, and our attention function, which transformers' models call once per layer.

A *mixer* is what mixes the tokens of a sequence in each layer, with the state that this takes. A family of models
(`aotgaudi.spec.cache_rows`) has one. It writes a step's new rows, reads those that the sequence has, and attends.

transformers' models pass every keyword of ``model(...)`` through unchanged, so the state of the step travels as the keyword
``paged``. No mask function is registered under our name, so the models add no mask operations to the graph.

Legend of shape suffixes: T tokens, b rows, q new tokens a row, n blocks, B block size, C cached tokens a row (c * B),
H query heads, K KV heads, G query heads a KV head, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from aotgaudi.errors import SpecError
from aotgaudi.graphs.step_inputs import Window

ATTENTION_NAME = "aotgaudi_paged"

IGNORED_KWARGS = frozenset({"position_ids", "use_cache", "output_router_logits", "dropout", "cache_position"})
"""Keywords that paged attention does not need: positions and the cache come from `paged`, dropout is 0 in
inference, and router logits do not concern attention."""

Masks = Mapping[Window, Any]
"""Sliding window (None: no window) -> mask, a tensor. In a dialect whose prompts need none, None: causal attention."""


@dataclass(frozen=True)
class LayerCall:
    """One layer's call, as transformers makes it: the layer, its tensors ``[1, heads, T, width]``, the variant's options."""

    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    sliding_window: int | None
    softcap: float | None
    sinks_H: Tensor | None

    @property
    def layer(self) -> str:
        """The layer's number, which names its first cache."""
        return str(self.module.layer_idx)

    @property
    def where(self) -> str:
        """The layer, for messages."""
        return f"model ({type(self.module).__name__}, layer {self.layer})"


class PagedState(Protocol):
    """The step's state, for every layer."""

    def attend(self, call: LayerCall) -> Tensor:
        """Writes the new rows and attends. Returns [1, T, H, width of a value]."""
        ...


class Mixer(Protocol):
    """How one family of models attends, in steps over caches by name. `inputs` are the step's, by name."""

    def install(self, model: Any) -> None:
        """Prepares a model for tracing. Raises SpecError for one whose modules lack what the mixer replaces."""
        ...

    def prompt_state(
        self, caches: Mapping[str, Tensor], inputs: Mapping[str, Tensor], masks: Masks
    ) -> object:
        """Returns the state of a prompt step, which travels as ``paged``."""
        ...

    def decode_state(
        self, caches: Mapping[str, Tensor], inputs: Mapping[str, Tensor], masks: Masks
    ) -> object:
        """Returns the state of a decode step."""
        ...


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
    call = LayerCall(
        module=module,
        query=query,
        key=key,
        value=value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks_H=s_aux,
    )
    unknown = sorted(set(kwargs) - IGNORED_KWARGS)
    if unknown:
        raise SpecError(
            call.where, f"attention keyword {unknown[0]!r} is not supported", "use another architecture"
        )
    if attention_mask is not None:
        raise SpecError(call.where, "the model builds its own attention mask", "use another architecture")
    return paged.attend(call), None


def mask_for(masks: Masks, window: Window) -> Any:
    """Returns the mask of a window. Raises SpecError for a window that the configuration does not name."""
    if window not in masks:
        raise SpecError(
            "model",
            f"a layer has the sliding window {window}",
            f"the configuration names {sorted(map(str, masks))}",
        )
    return masks[window]


def slots_of(slots_T: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Returns the block and the offset of each slot (``block * B + offset``).

    Write to a cache with both, in one indexed write to the input itself. A write through a view (``cache[0][...] = k``)
    or with another kind of index would make the compiled graph copy the whole cache on every call.
    """
    return slots_T // block_size, slots_T % block_size


def with_context(plane_nKBD: Tensor, new_TKD: Tensor, ctx_blocks_bc: Tensor | None, b: int) -> Tensor:
    """Returns [b, K, C + q, D]: what a plane of the cache has for the rows' context blocks, then the new tokens'."""
    new_bKqD: Tensor = new_TKD.unflatten(0, (b, -1)).transpose(1, 2)
    if ctx_blocks_bc is None:
        return new_bKqD
    c = ctx_blocks_bc.shape[1]
    gathered = plane_nKBD.index_select(0, ctx_blocks_bc.flatten()).unflatten(0, (b, c))
    return torch.cat([gathered.transpose(1, 2).flatten(2, 3), new_bKqD], dim=2)
