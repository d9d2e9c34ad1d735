"""Compressed attention (DeepSeek V4): a window of tokens, and entries that each stand for several tokens.

A layer's keys are its values: one row of D numbers, rotated at its position, for all query heads. What they collect is
rotated back. Every layer reads the last W tokens. A layer with a compressor also reads entries: one for each window of r
tokens, aligned to the sequence's begin, once the window is complete. An entry is the sum of a value for each token, weighed
by a softmax over gates, then normed and rotated at the window's first token. With an indexer (CSA) an entry is made of 2r
tokens, in two series: the first of the window before, the second of its own. The indexer makes a key for each entry in the
same way, and a query reads the k entries whose keys score highest.

Values and gates of tokens are kept in the cache (``raw``), so a window may be completed in another step than it began.
The caches and the step's inputs are those of `aotgaudi.spec.cache_rows` and `aotgaudi.graphs.step_inputs`.

Legend of shape suffixes: see `base.py`; N windows that a step may complete (w of each row), S tokens that one is made of,
W numbers that a token's raw row has, E entries, k keys of a row, I indexer's heads, M numbers of its keys, P pairs that are
rotated.

Formulas: transformers 5.23 (models/deepseek_v4/modeling_deepseek_v4.py), whose modules and weights these are.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from aotgaudi.errors import SpecError
from aotgaudi.graphs.choose_entries import CHOOSE_ENTRIES
from aotgaudi.graphs.mixers.base import IGNORED_KWARGS, Masks, slots_of, with_context
from aotgaudi.graphs.paged_decode import MASKED, PAGED_DECODE
from aotgaudi.graphs.step_inputs import MaskKind
from aotgaudi.spec.cache_rows import Compression

_PARTS = ("q_a_proj", "q_b_norm", "kv_norm", "o_a_proj", "o_b_proj", "sinks", "compressor", "rope_layer_type")
"""What an attention module has whose `forward` we replace."""


class CompressedMixer:
    """Attention over a window and entries. `compressions`: how each layer makes entries."""

    def __init__(self, compressions: tuple[Compression | None, ...]) -> None:
        self._compressions = compressions

    def install(self, model: Any) -> None:
        """Replaces the forward of every attention module. Raises SpecError unless each layer has one of the known form."""
        modules = [module for module in model.modules() if all(hasattr(module, part) for part in _PARTS)]
        if [module.layer_idx for module in modules] != list(range(len(self._compressions))):
            raise SpecError(
                "model.config.model_type",
                f"{model.config.model_type!r} has {len(modules)} compressed attentions in {len(self._compressions)} layers",
                "use a model with one in each layer",
            )
        for module in modules:
            module.forward = MethodType(_forward, module)

    def prompt_state(
        self, caches: Mapping[str, Tensor], inputs: Mapping[str, Tensor], masks: Masks
    ) -> CompressedState:
        """Returns the state of a prompt step."""
        return CompressedPromptState(self._compressions, caches, inputs)

    def decode_state(
        self, caches: Mapping[str, Tensor], inputs: Mapping[str, Tensor], masks: Masks
    ) -> CompressedState:
        """Returns the state of a decode step."""
        return CompressedDecodeState(self._compressions, caches, inputs)


def _forward(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: Mapping[str, tuple[Tensor, Tensor]],
    position_ids: Tensor,
    attention_mask: Tensor | None = None,
    past_key_values: None = None,
    *,
    paged: CompressedState,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention module's forward while a step is traced, with transformers' arguments."""
    unknown = sorted(set(kwargs) - IGNORED_KWARGS)
    if unknown or attention_mask is not None or past_key_values is not None:
        what = f"keyword {unknown[0]!r}" if unknown else "a mask or a cache of the model's own"
        raise SpecError(
            f"model ({type(module).__name__}, layer {module.layer_idx})",
            f"{what} is not supported",
            "use another architecture",
        )
    x_TX = hidden_states[0]
    cos_TP, sin_TP = (angle[0] for angle in position_embeddings[module.rope_layer_type])
    latent_TX = module.q_a_norm(module.q_a_proj(x_TX))
    q_THD = module.q_b_norm(module.q_b_proj(latent_TX).unflatten(-1, (-1, module.head_dim)))
    call = CompressedCall(
        module=module,
        x_TX=x_TX,
        latent_TX=latent_TX,
        positions_1T=position_ids,
        q_THD=rotated(q_THD, cos_TP[:, None], sin_TP[:, None]),
        keys_TD=rotated(module.kv_norm(module.kv_proj(x_TX)), cos_TP, sin_TP),
    )
    out_THD = rotated(paged.attend(call), cos_TP[:, None], -sin_TP[:, None])
    grouped = module.o_a_proj(out_THD.reshape(1, len(x_TX), module.config.o_groups, -1))
    return module.o_b_proj(grouped.flatten(2)), None


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the last pairs of neighbouring numbers of `x`, as many as `cos` has. Computed in float32."""
    width = 2 * cos.shape[-1]
    even, odd = x[..., -width:].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
    return torch.cat([x[..., :-width], turned.to(x.dtype)], dim=-1)


@dataclass(frozen=True)
class CompressedCall:
    """One layer's call: its attention module and its input, the latent of its queries, queries and the new tokens' keys."""

    module: Any
    x_TX: Tensor
    latent_TX: Tensor
    positions_1T: Tensor
    q_THD: Tensor
    keys_TD: Tensor

    @property
    def indexer(self) -> Any:
        """The module that chooses among entries."""
        return self.module.compressor.indexer

    def index_queries(self) -> tuple[Tensor, Tensor]:
        """Returns the indexer's queries [T, I, M], and the weights of their scores [T, I], in float32."""
        indexer = self.indexer
        queries_TIM = indexer.q_b_proj(self.latent_TX).unflatten(-1, (-1, indexer.head_dim))
        cos_TP, sin_TP = _angles(indexer, self.x_TX, self.positions_1T)
        queries_TIM = rotated(queries_TIM, cos_TP[:, None], sin_TP[:, None]).float()
        weights_TI = indexer.scorer.weights_proj(self.x_TX).float() * indexer.scorer.weights_scaling
        return queries_TIM, weights_TI * indexer.scorer.softmax_scale


def _angles(part: Any, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = part.rotary_emb(like, position_ids=positions, layer_type=part.rope_layer_type)
    return cos[0], sin[0]


@dataclass(frozen=True)
class CompressedState(ABC):
    """What prompt and decode steps have in common: new rows are written, and entries made."""

    compressions: tuple[Compression | None, ...]
    caches: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]

    def attend(self, call: CompressedCall) -> Tensor:
        """Writes the new tokens and the entries that they complete, and attends. Returns [T, H, D]."""
        layer = _Layer.of(self, call)
        return self.attend_over(call, layer)

    @abstractmethod
    def attend_over(self, call: CompressedCall, layer: _Layer) -> Tensor:
        """Attends over a layer whose new rows are written. Returns [T, H, D]."""


@dataclass(frozen=True)
class _Layer:
    """A layer whose new rows are written: its cache, its mask, and with entries their new ones and their keys [N, ...]."""

    cache: Tensor
    mask: Tensor
    index_cache: Tensor | None = None
    entries_ND: Tensor | None = None
    index_keys_NM: Tensor | None = None

    @classmethod
    def of(cls, state: CompressedState, call: CompressedCall) -> _Layer:
        """Writes the rows, and returns the layer."""
        number, inputs = call.module.layer_idx, state.inputs
        cache, compression = state.caches[str(number)], state.compressions[number]
        if compression is None:
            blocks, offsets = slots_of(inputs["slots"], cache.shape[3])
            cache[:, blocks, :, offsets] = call.keys_TD[:, None, None]
            return cls(cache, inputs[MaskKind(call.module.sliding_window).name])
        every, raw_cache = compression.every, state.caches[f"{number}.raw"]
        block_size = raw_cache.shape[3]
        blocks, offsets = slots_of(inputs["slots"], block_size)
        raw_cache[:, blocks, :, offsets] = _raw_rows(call, compression)[:, None, None]
        entries = list(_entries(call, compression, raw_cache, inputs[f"windows_r{every}"], inputs))
        entry_blocks, entry_offsets = slots_of(inputs[f"entry_slots_r{every}"], block_size // every)
        # One write, of tokens and entries: see `slots_of`.
        all_blocks = torch.cat([blocks, entry_blocks])
        all_offsets = torch.cat([offsets, entry_offsets + block_size])
        cache[:, all_blocks, :, all_offsets] = torch.cat([call.keys_TD, entries[0]])[:, None, None]
        mask = inputs[MaskKind(compression.window, every).name]
        if not compression.is_indexed:
            return cls(cache, mask, entries_ND=entries[0])
        index_cache = state.caches[f"{number}.index"]
        index_cache[:, entry_blocks, :, entry_offsets] = entries[1][:, None, None]
        return cls(cache, mask, index_cache, *entries)


def _compressors(call: CompressedCall, compression: Compression) -> tuple[Any, ...]:
    """Returns the modules that make entries and, with an indexer, their keys."""
    return (call.module.compressor, *([call.indexer] if compression.is_indexed else []))


def _raw_rows(call: CompressedCall, compression: Compression) -> Tensor:
    """Returns [T, W] float32: values and gates of each compressor. A gate's bias follows from the place in the window."""
    places_T = call.positions_1T[0] % compression.every
    return torch.cat(
        [
            part.float()
            for module in _compressors(call, compression)
            for part in (
                module.kv_proj(call.x_TX),
                module.gate_proj(call.x_TX) + module.position_bias[places_T],
            )
        ],
        dim=-1,
    )


def _entries(
    call: CompressedCall,
    compression: Compression,
    raw_cache: Tensor,
    windows_bwS: Tensor,
    inputs: Mapping[str, Tensor],
) -> Iterator[Tensor]:
    """Yields the new entries [N, D] and, with an indexer, their keys [N, M], made of the raw rows in slots `windows_bwS`."""
    every, size = compression.every, compression.num_read
    # Inputs are as wide as the widest window of their ratio.
    windows_NS = windows_bwS[..., -size:].flatten(0, 1)
    seen_NS1 = inputs[f"windows_seen_r{every}"][..., -size:].flatten(0, 1)[..., None]
    blocks_NS, offsets_NS = slots_of(windows_NS, raw_cache.shape[3])
    rows_NSW = raw_cache[0, :, 0][blocks_NS, offsets_NS]
    modules = _compressors(call, compression)
    widths = itertools.chain.from_iterable([module.kv_proj.weight.shape[0]] * 2 for module in modules)
    parts = rows_NSW.split(list(widths), dim=-1)
    if compression.is_indexed:
        parts = tuple(_two_series(part, every) for part in parts)
    for module, values, gates in zip(modules, parts[::2], parts[1::2], strict=True):
        weights = torch.softmax(torch.where(seen_NS1, gates, MASKED), dim=1)
        entries = module.kv_norm((torch.where(seen_NS1, values, 0.0) * weights).sum(1))
        cos_NP, sin_NP = _angles(module, entries, inputs[f"entry_positions_r{every}"][None])
        yield rotated(entries, cos_NP, sin_NP).to(call.x_TX.dtype)


def _two_series(part_NSW: Tensor, every: int) -> Tensor:
    """Returns the first series of the window before, then the second of the window itself: [N, S, W / 2]."""
    first, second = part_NSW.chunk(2, dim=-1)
    return torch.cat([first[:, :every], second[:, every:]], dim=1)


@dataclass(frozen=True)
class CompressedPromptState(CompressedState):
    """A prefill step of b rows, q new tokens each, after c blocks of cached context (maybe none)."""

    def attend_over(self, call: CompressedCall, layer: _Layer) -> Tensor:
        """Attends over the blocks of the context, the new tokens and the new entries. Returns [T, H, D]."""
        b, q = layer.mask.shape[0], layer.mask.shape[2]
        context = self.inputs.get("ctx_blocks")
        new_bkD = call.keys_TD.unflatten(0, (b, q))
        if layer.entries_ND is not None:
            new_bkD = torch.cat([new_bkD, layer.entries_ND.unflatten(0, (b, -1))], dim=1)
        keys_bkD = with_context(layer.cache[0], new_bkD.flatten(0, 1)[:, None], context, b)[:, 0]
        mask_b1qk = layer.mask
        if layer.index_keys_NM is not None:
            mask_b1qk = self._chosen(call, layer, context)
        query_bHqD = call.q_THD.unflatten(0, (b, q)).transpose(1, 2)
        scores = torch.bmm(query_bHqD.flatten(1, 2), keys_bkD.transpose(1, 2)).unflatten(1, (-1, q))
        scores = torch.where(mask_b1qk, scores.float() * call.module.scaling, MASKED)
        sinks = call.module.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
        out = torch.bmm(weights.to(keys_bkD.dtype).flatten(1, 2), keys_bkD).unflatten(1, (-1, q))
        out_THD: Tensor = out.transpose(1, 2).flatten(0, 1)
        return out_THD

    def _chosen(self, call: CompressedCall, layer: _Layer, context: Tensor | None) -> Tensor:
        """Returns the mask without the entries that the indexer does not choose."""
        assert layer.index_cache is not None
        assert layer.index_keys_NM is not None
        b, q = layer.mask.shape[0], layer.mask.shape[2]
        mask_bqk = layer.mask[:, 0]
        keys_bEM = with_context(layer.index_cache[0], layer.index_keys_NM[:, None], context, b)[:, 0]
        num_new = layer.index_keys_NM.shape[0] // b
        in_context, new_tokens, new_entries = mask_bqk.split(
            [mask_bqk.shape[2] - q - num_new, q, num_new], dim=2
        )
        queries_TIM, weights_TI = call.index_queries()
        queries_bXM = queries_TIM.unflatten(0, (b, q)).flatten(1, 2)
        products = torch.bmm(queries_bXM, keys_bEM.float().transpose(1, 2)).relu().unflatten(1, (q, -1))
        scores_bqE = (products * weights_TI.unflatten(0, (b, q))[..., None]).sum(2)
        if context is None:
            chosen = CHOOSE_ENTRIES(scores_bqE, new_entries, call.indexer.index_topk)
            return torch.cat([new_tokens, chosen], dim=2)[:, None]
        c, per_block = context.shape[1], layer.index_cache.shape[3]
        tokens, entries = in_context.unflatten(2, (c, -1)).tensor_split([-per_block], dim=3)
        seen_bqE = torch.cat([entries.flatten(2), new_entries], dim=2)
        chosen = CHOOSE_ENTRIES(scores_bqE, seen_bqE, call.indexer.index_topk)
        cached, new = chosen.split([c * per_block, num_new], dim=2)
        blocks = torch.cat([tokens, cached.unflatten(2, (c, -1))], dim=3).flatten(2)
        return torch.cat([blocks, new_tokens, new], dim=2)[:, None]


@dataclass(frozen=True)
class CompressedDecodeState(CompressedState):
    """A decode step of b rows, flat over n blocks."""

    def attend_over(self, call: CompressedCall, layer: _Layer) -> Tensor:
        """Attends to the tokens and entries of each row's blocks in place. Returns [b, H, D]."""
        seen = layer.mask if layer.index_cache is None else self._chosen(call, layer, layer.index_cache)
        module, blocks, rows = call.module, self.inputs["block_list"], self.inputs["block_rows"]
        out_bHD: Tensor = PAGED_DECODE(
            call.q_THD, layer.cache, blocks, rows, seen, module.sinks, module.scaling, 0.0
        )
        return out_bHD

    def _chosen(self, call: CompressedCall, layer: _Layer, index_cache: Tensor) -> Tensor:
        """Returns the mask [n, rows a block] without the entries that the indexer does not choose for a row."""
        rows_n, per_block = self.inputs["block_rows"], index_cache.shape[3]
        keys_nEM = index_cache[0, :, 0].index_select(0, self.inputs["block_list"]).float()
        queries_bIM, weights_bI = call.index_queries()
        products = torch.bmm(queries_bIM.index_select(0, rows_n), keys_nEM.transpose(1, 2)).relu()
        scores_nE = (products * weights_bI.index_select(0, rows_n)[..., None]).sum(1)
        tokens, seen_nE = layer.mask.tensor_split([-per_block], dim=1)
        b, n = queries_bIM.shape[0], rows_n.shape[0]
        is_mine_bn = rows_n == torch.arange(b)[:, None]
        seen_bnE = is_mine_bn[..., None] & seen_nE
        chosen_bnE = CHOOSE_ENTRIES(
            scores_nE.expand(b, -1, -1).flatten(1), seen_bnE.flatten(1), call.indexer.index_topk
        ).unflatten(1, (n, per_block))
        return torch.cat([tokens, chosen_bnE[rows_n, torch.arange(n)]], dim=1)
