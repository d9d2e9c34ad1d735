"""The form of graphs that Intel's bridge compiles whole, without a fallback to the CPU, and writes in place.

Every unit is traced static, the number of KV blocks included. What a step's masks follow from crosses the bus as numbers of
its rows and blocks; a unit of its own, the *prologue*, makes the masks on the device. So the graphs before the first layer
stay independent of the context.

What is avoided, and why, are lines of docs/reference/hpu-contract.md: K-19 (operators that are not lowered), K-21 (writes
that copy the cache), K-34 (views as outputs).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from aotgaudi.entries import PromptEntry, StepEntry
from aotgaudi.errors import SpecError
from aotgaudi.graphs.dialect import Dialect
from aotgaudi.graphs.mixers.base import Mixer
from aotgaudi.graphs.mixers.slots import ROWS, SlotMixer
from aotgaudi.graphs.paged_decode import MASKED
from aotgaudi.graphs.program import CacheSpec, TensorSpec
from aotgaudi.graphs.sample_sorted import sample_sorted
from aotgaudi.graphs.sampler import SamplerGraph
from aotgaudi.graphs.step_inputs import MaskKind, Window, hpu_inputs, mask_name
from aotgaudi.spec.cache_rows import family_of, rows_of
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.model import ModelSpec
from aotgaudi.spec.sampler_signature import SamplerSignature

_DTYPES = ("bfloat16", "float32")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_RAW = frozenset(
    {"input_ids", "positions", "slots", "ctx_blocks", "logits_indices", "num_padding", "block_list"}
)
"""Inputs that a step's own graph takes as they are given; the others are for the prologue."""

_aten = torch.ops.aten


class HpuForm:
    """See `aotgaudi.graphs.forms.Form`."""

    pads_with_zeros = False

    def __init__(self, dialect: Dialect) -> None:
        self._dialect, self._is_contiguous = dialect, dialect.is_contiguous

    def require_built(self, config: Any, model: ModelSpec, *, has_packed_weights: bool) -> None:
        """Raises SpecError, naming it, for what is not built for hpu."""
        expected = "a dense decoder in bfloat16 or float32, or an aotgaudi capture of a vllm-gaudi server"
        if model.dtype not in _DTYPES:
            raise SpecError("model.dtype", f"{model.dtype!r} is not built for hpu", " or ".join(_DTYPES))
        if family_of(model) != "uniform":
            raise SpecError(
                "model.config.model_type", f"{family_of(model)} attention is not built for hpu", expected
            )
        experts = next((name for name in _EXPERTS if getattr(config, name, None)), None)
        if experts is not None:
            raise SpecError(f"model.config.{experts}", "mixtures of experts are not built for hpu", expected)
        if has_packed_weights:
            raise SpecError("model.quantization", "is in a form that is not built for hpu", "leave it out")

    def caches(self, model: ModelSpec, limits: ServingLimits) -> tuple[CacheSpec, ...]:
        """Returns two caches a layer, in flat slots."""
        num_slots = (limits.num_blocks + 1) * limits.block_size
        return tuple(
            CacheSpec(
                name=f"{rows.name}.{part}", shape=(num_slots, rows.heads, rows.width), dtype=model.dtype
            )
            for rows in rows_of(model)
            for part in ("k", "v")
        )

    def cache_to_trace(self, spec: CacheSpec) -> tuple[Tensor, None]:
        """Returns a cache of its full size, whose memory is never touched, and no open dimension."""
        return torch.empty(spec.sizes(0), dtype=getattr(torch, spec.dtype)), None

    def step_inputs(
        self, entry: StepEntry, limits: ServingLimits, windows: Sequence[Window], model: ModelSpec
    ) -> tuple[TensorSpec, ...]:
        """Returns what a step's own graph takes: inputs as they are given, and what the prologue makes."""
        given = (spec for spec in hpu_inputs(entry, self._dialect) if spec.name in _RAW)
        return (*given, *self._made(entry, limits, windows, model.dtype))

    def mixer(self, model: ModelSpec, limits: ServingLimits) -> Mixer:
        """Returns attention over flat slots."""
        del model
        return SlotMixer(limits.block_size, self._is_contiguous)

    def prologue(
        self, entry: StepEntry, limits: ServingLimits, dtype: str, names: Sequence[str]
    ) -> tuple[nn.Module, tuple[TensorSpec, ...]] | None:
        """Returns what makes the inputs `names` of a step's graph on the device, and the inputs that it takes."""
        windows = tuple(_window(name) for name in names if name != ROWS)
        if not names:
            return None
        given = {spec.name: spec for spec in hpu_inputs(entry, self._dialect)}
        if isinstance(entry, PromptEntry):
            takes = ("starts", "num_padding") if entry.num_ctx_blocks else ("num_padding",)
            made: nn.Module = _PromptMasks(entry, limits.block_size, windows, dtype)
        else:
            takes = ("pool_rows", "pool_ends") if self._is_contiguous else ("block_rows", "block_ends")
            made = _DecodeMasks(entry.batch_size, self._num_read(entry, limits), limits.block_size, windows)
        return made, tuple(given[name] for name in takes)

    def made_by_prologue(self, used: Sequence[str]) -> tuple[str, ...]:
        """Returns the names among `used`, inputs of a step's graph, that the prologue makes, in its outputs' order."""
        masks = sorted((name for name in used if name.startswith(mask_name(None))), key=_by_window)
        return (*([ROWS] if ROWS in used else []), *masks)

    def finish(self, graph: fx.Graph) -> None:
        """Changes a piece's graph: selects rows by ``index_select``, moves nothing, and copies outputs that may be views."""
        for node in [node for node in graph.nodes if node.target is _aten.to.device]:
            node.target, node.args = _aten.to.dtype, (node.args[0], *node.args[2:])
        for node in [node for node in graph.nodes if node.target is _aten.index.Tensor]:
            _select(graph, node)
        output = graph.output_node()
        results: Any = output.args[0]
        is_single = isinstance(results, fx.Node)
        copied = tuple(_copied(graph, node) for node in ((results,) if is_single else results))
        output.args = (copied[0] if is_single else copied,)

    def sampler(self, signature: SamplerSignature, num_logprobs: int) -> SamplerGraph:
        """Returns the sampler's graph."""
        return SamplerGraph(signature, num_logprobs, choose=sample_sorted)

    def exchange(self, limits: ServingLimits) -> tuple[nn.Module, ...]:
        """Returns what exchanges blocks of a cache. A graph that read and wrote a cache would copy it whole."""
        return _ReadBlocks(limits.block_size), _WriteBlocks(limits.block_size)

    def _made(
        self, entry: StepEntry, limits: ServingLimits, windows: Sequence[Window], dtype: str
    ) -> tuple[TensorSpec, ...]:
        """Returns what the prologue can make. A prompt without context needs no bias for a window that holds it all."""
        if isinstance(entry, PromptEntry):
            b, q, context = entry.batch_size, entry.query_len, entry.num_ctx_blocks * limits.block_size
            return tuple(
                TensorSpec(name=mask_name(window), shape=(b, 1, q, context + q), dtype=dtype)
                for window in windows
                if context or (window is not None and window < q)
            )
        n = self._num_read(entry, limits)
        return (
            TensorSpec(name=ROWS, shape=(entry.batch_size, n), dtype="bool"),
            *(
                TensorSpec(name=mask_name(window), shape=(n, limits.block_size), dtype="bool")
                for window in windows
            ),
        )

    def _num_read(self, entry: StepEntry, limits: ServingLimits) -> int:
        """Returns how many blocks a decode reads: contiguous ones end where the cache ends."""
        num_blocks = 0 if isinstance(entry, PromptEntry) else entry.num_blocks
        return min(num_blocks, limits.num_blocks) if self._is_contiguous else num_blocks


class _PromptMasks(nn.Module):
    """(starts [b] if there is context, num_padding [b]) -> a bias [b, 1, q, C + q] for each window: 0 where a query looks.

    A query sees the cached tokens of its row, and the new ones up to its own; through a window, the newest of these.
    """

    def __init__(self, entry: PromptEntry, block_size: int, windows: Sequence[Window], dtype: str) -> None:
        super().__init__()
        self._q, self._context = entry.query_len, entry.num_ctx_blocks * block_size
        self._windows, self._dtype = windows, getattr(torch, dtype)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        seen = (self._seen(window, *tensors) for window in self._windows)
        return tuple(torch.where(seen_bqk, 0.0, MASKED).to(self._dtype)[:, None] for seen_bqk in seen)

    def _seen(self, window: Window, *tensors: Tensor) -> Tensor:
        lengths_b11 = self._q - tensors[-1][:, None, None]
        new_q, new_q1 = torch.arange(self._q), torch.arange(self._q)[:, None]
        seen_new = (new_q <= new_q1) & (new_q < lengths_b11)
        if window is not None:
            seen_new = seen_new & (new_q > new_q1 - window)
        if not self._context:
            return seen_new
        starts_b11, cached_C = tensors[0][:, None, None], torch.arange(self._context)
        least = new_q1 * 0 if window is None else starts_b11 + new_q1 - window + 1
        seen_cached = (cached_C < starts_b11) & (cached_C >= least)
        return torch.cat([seen_cached, seen_new], dim=2)


class _DecodeMasks(nn.Module):
    """(rows [n], ends [n]) -> the rows' blocks [b, n], then for each window which tokens of a block its row sees [n, B].

    A block's end is how many tokens its row has from the block's start on, the newest included; 0 where it is padding.
    """

    def __init__(self, batch_size: int, n: int, block_size: int, windows: Sequence[Window]) -> None:
        super().__init__()
        self._b, self._n, self._block_size, self._windows = batch_size, n, block_size, windows

    def forward(self, rows_n: Tensor, ends_n: Tensor) -> tuple[Tensor, ...]:
        rows_n, ends_n1, places_B = rows_n[: self._n], ends_n[: self._n, None], torch.arange(self._block_size)
        mine_bn = torch.arange(self._b)[:, None] == rows_n
        seen_nB = places_B < ends_n1
        masks = (
            seen_nB if window is None else seen_nB & (places_B >= ends_n1 - window)
            for window in self._windows
        )
        return (mine_bn, *masks)


class _ReadBlocks(nn.Module):
    """cache [slots, K, D], sources [n], destinations [n] -> their blocks [2 n, B, K, D]."""

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self._block_size = block_size

    def forward(self, cache: Tensor, sources: Tensor, destinations: Tensor) -> Tensor:
        blocks: Tensor = cache.unflatten(0, (-1, self._block_size))
        return blocks.index_select(0, torch.cat([sources, destinations]))


class _WriteBlocks(nn.Module):
    """cache, blocks [2 n, B, K, D], sources [n], destinations [n] -> the sources. Writes each block to the other's place."""

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self._block_size = block_size

    def forward(self, cache: Tensor, moved: Tensor, sources: Tensor, destinations: Tensor) -> Tensor:
        blocks = torch.cat([destinations, sources])
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        cache.index_copy_(0, slots, moved.flatten(0, 1))
        return sources.clone()


def _window(mask: str) -> Window:
    kind = MaskKind.of(mask)
    return None if kind is None else kind.window


def _by_window(mask: str) -> int:
    return _window(mask) or 0


def _select(graph: fx.Graph, node: fx.Node) -> None:
    """Replaces an index by one tensor of one dimension. Any other index stays, and the bridge refuses it by name."""
    source, indices = node.args[:2]
    places = [(dim, index) for dim, index in enumerate(indices) if index is not None]  # type: ignore[arg-type]
    if len(places) == 1 and isinstance(places[0][1], fx.Node) and places[0][1].meta["val"].dim() == 1:
        with graph.inserting_before(node):
            selected = graph.call_function(_aten.index_select.default, (source, *places[0]))
        selected.meta = dict(node.meta)
        node.replace_all_uses_with(selected)
        graph.erase_node(node)


def _copied(graph: fx.Graph, node: fx.Node) -> fx.Node:
    if not _may_be_view(node):
        return node
    with graph.inserting_before(graph.output_node()):
        copy = graph.call_function(_aten.clone.default, (node,))
    copy.meta = dict(node.meta)
    return copy


def _may_be_view(node: fx.Node) -> bool:
    """Whether a result may share memory with an input, or be a view after composite operators are taken apart."""
    if node.op != "call_function" or node.target is operator.getitem:
        return True
    target: Any = node.target
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
    return is_composite or any(result.alias_info is not None for result in target._schema.returns)
