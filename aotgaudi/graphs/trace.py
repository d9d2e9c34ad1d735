"""Entry -> traced program: the canonical texts of its pieces and how they are put together.

The build decides which artifacts run the pieces, so a traced program is the same for every target.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save
from torch import fx, nn

from aotgaudi.entries import DecodeEntry, DefragEntry, Entry, MhcEntry, PromptEntry, SamplerEntry
from aotgaudi.errors import SpecError
from aotgaudi.graphs.canonical import to_text
from aotgaudi.graphs.export import export
from aotgaudi.graphs.hyper_connections import class_text
from aotgaudi.graphs.invariant import batch_invariant, require_invariant
from aotgaudi.graphs.layer_reuse import reusing_layers
from aotgaudi.graphs.mixers.families import require_modes
from aotgaudi.graphs.program import CacheSpec, TensorSpec
from aotgaudi.graphs.quantization import QUANTIZATIONS, Quantization
from aotgaudi.graphs.sampler import SamplerGraph
from aotgaudi.graphs.split import Piece, SplitStep, split_step
from aotgaudi.graphs.step import (
    StepEntry,
    any_blocks,
    build_model,
    cache_specs,
    described_by,
    export_step,
    step_inputs,
    zero_cache,
)
from aotgaudi.graphs.step_inputs import sampler_inputs
from aotgaudi.graphs.swap import SwapGraph
from aotgaudi.spec.hyper_connections import HyperConnections
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.model import ModelSpec
from aotgaudi.spec.quantization import WeightsDtype


@dataclass(frozen=True)
class TracedProgram:
    """A program before its pieces have artifacts. `constants` is a safetensors blob, or None."""

    inputs: tuple[TensorSpec, ...]
    weights: tuple[TensorSpec, ...]
    caches: tuple[CacheSpec, ...]
    pieces: tuple[Piece, ...]
    outputs: tuple[str, ...]
    constants: bytes | None


def trace(entry: Entry, model: ModelSpec, limits: ServingLimits, *, n_splits: int = 1) -> TracedProgram:
    """Traces one entry. Raises SpecError or CompileError for a model or a graph that cannot be traced.

    `n_splits`: into how many partial sums a step splits the model's hyper-connections. An ``mhc`` entry says its own.
    """
    if isinstance(entry, (PromptEntry, DecodeEntry)):
        return _trace_step(entry, model, limits, n_splits)
    if isinstance(entry, SamplerEntry):
        return _trace_sampler(entry, model)
    if isinstance(entry, DefragEntry):
        return _trace_swap(entry, model, limits)
    if isinstance(entry, MhcEntry):
        return _trace_hyper_connection(entry, model)
    raise SpecError(
        f"entry {entry}",
        f"{entry.kind} graphs are enumerated, not built, by this version",
        "a spec without them, or the server whose graphs they are",
    )


def _trace_step(
    entry: PromptEntry | DecodeEntry, model: ModelSpec, limits: ServingLimits, n_splits: int
) -> TracedProgram:
    tracer = _tracer(json.dumps(model.config), model.dtype, model.batch_invariant, model.weights_dtype)
    split = tracer.split(entry, limits, n_splits)
    used = {name for piece in split.pieces for name in piece.inputs}
    _require_paged(model, _caches(model, limits), used)
    specs = step_inputs(tracer.module, entry, limits)
    return TracedProgram(
        inputs=tuple(spec for spec in specs if f"step:{spec.name}" in used),
        weights=split.weights,
        caches=_caches(model, limits),
        pieces=split.pieces,
        outputs=split.outputs,
        constants=save(dict(sorted(split.constants.items()))) if split.constants else None,
    )


def _trace_sampler(entry: SamplerEntry, model: ModelSpec) -> TracedProgram:
    if entry.batch_size == 0:
        raise SpecError(
            f"entry {entry}",
            "is another server's warm-up of an empty batch: enumerated, not built",
            "sampler.smallest_batch_size = 1",
        )
    specs = sampler_inputs(entry.batch_size, entry.signature, model.vocab_size, model.dtype)
    graph = SamplerGraph(entry.signature, entry.num_logprobs)
    outputs = tuple(f"0.{number}" for number in range(graph.num_outputs))
    with batch_invariant() if model.batch_invariant else contextlib.nullcontext():
        exported = _export(graph, tuple(_zeros(spec) for spec in specs)).graph
    if model.batch_invariant:
        require_invariant(exported, str(entry))
    piece = Piece(to_text(exported), _steps(*specs), outputs, "sampler")
    return TracedProgram(
        inputs=specs, weights=(), caches=(), pieces=(piece,), outputs=outputs, constants=None
    )


def _trace_swap(entry: DefragEntry, model: ModelSpec, limits: ServingLimits) -> TracedProgram:
    """One unit for each distinct form of a cache, called once for each cache of that form."""
    caches, n = _caches(model, limits), entry.padded_swaps
    specs = tuple(TensorSpec(name=name, shape=(n,), dtype="int64") for name in ("sources", "destinations"))
    dynamic = (any_blocks(), None, None)
    texts: dict[tuple[object, ...], str] = {}
    for cache in caches:
        form = cache.shape, cache.dtype
        if form not in texts:
            args = (zero_cache(cache), *(_zeros(spec) for spec in specs))
            texts[form] = to_text(_export(SwapGraph(), args, dynamic).graph)
    pieces = tuple(
        Piece(
            texts[cache.shape, cache.dtype], (f"kv:{cache.name}", *_steps(*specs)), (f"{number}.0",), "swap"
        )
        for number, cache in enumerate(caches)
    )
    return TracedProgram(inputs=specs, weights=(), caches=caches, pieces=pieces, outputs=(), constants=None)


def _trace_hyper_connection(entry: MhcEntry, model: ModelSpec) -> TracedProgram:
    """The unit that all steps of the entry's class call, over as many tokens as the entry says.

    Its weights are inputs of the step, not of the checkpoint, so one program serves every layer. Attention and feed-forward
    entries give equal programs. Outputs: how to write a sublayer's output back, and the sublayer's input.
    """
    if model.batch_invariant and entry.n_splits > 1:
        raise SpecError(
            f"entry {entry}", "splits its sums by the number of tokens", "model.batch_invariant = false"
        )
    streams = HyperConnections.of(model)
    if streams is None:
        raise SpecError(f"entry {entry}", f"{model.model_type!r} has no hyper-connections", "another spec")
    t, h, d, n = entry.num_tokens, streams.hc_mult, streams.hidden_size, streams.num_mixes
    inputs = (
        TensorSpec(name="residual", shape=(1, t, h, d), dtype=model.dtype),
        TensorSpec(name="fn", shape=(n, h * d), dtype="float32"),
        TensorSpec(name="scale", shape=(3,), dtype="float32"),
        TensorSpec(name="base", shape=(n,), dtype="float32"),
    )
    outputs = ("0.0", "0.1", "0.2")
    text = class_text(streams, entry.n_splits, getattr(torch, model.dtype))
    piece = Piece(text, _steps(*inputs), outputs, "hc_pre")
    return TracedProgram(
        inputs=inputs, weights=(), caches=(), pieces=(piece,), outputs=outputs, constants=None
    )


def _steps(*specs: TensorSpec) -> tuple[str, ...]:
    return tuple(f"step:{spec.name}" for spec in specs)


def stored_names(module: nn.Module) -> Mapping[str, str]:
    """Returns the stored name of every tensor of a checkpoint. Tied tensors share the first one's name."""
    first: dict[int, str] = {}
    tensors = module.state_dict(keep_vars=True)
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}


class _StepTracer:
    """Traces the steps of one model. It reuses layers once a full trace has shown that the result is the same."""

    def __init__(self, module: Any, is_invariant: bool, quantization: Quantization | None) -> None:
        self.module, self._is_invariant, self._quantization = module, is_invariant, quantization
        self._stored = stored_names(module)
        self._can_reuse: dict[type[StepEntry], bool] = {}

    def split(self, entry: StepEntry, limits: ServingLimits, n_splits: int) -> SplitStep:
        """Returns the step of `entry` in pieces."""
        kind = type(entry)
        if kind not in self._can_reuse:
            full = self._full(entry, limits, n_splits)
            guess = self._reusing(entry, limits, n_splits)
            self._can_reuse[kind] = (guess.pieces, guess.outputs) == (full.pieces, full.outputs)
            return full
        is_full = not self._can_reuse[kind]
        return (self._full if is_full else self._reusing)(entry, limits, n_splits)

    def _full(self, entry: StepEntry, limits: ServingLimits, n_splits: int) -> SplitStep:
        exported = export_step(self.module, entry, limits, is_invariant=self._is_invariant, n_splits=n_splits)
        return split_step(exported, self._stored, quantization=self._quantization)

    def _reusing(self, entry: StepEntry, limits: ServingLimits, n_splits: int) -> SplitStep:
        with reusing_layers(self.module):
            return self._full(entry, limits, n_splits)


@functools.lru_cache(maxsize=2)
def _tracer(
    config_json: str, dtype: str, is_invariant: bool, weights_dtype: WeightsDtype | None
) -> _StepTracer:
    """Returns the tracer of a model. A build needs one; the second is for tests."""
    quantization = None if weights_dtype is None else QUANTIZATIONS[weights_dtype]
    module = build_model(json.loads(config_json), dtype)
    described = described_by(module.config.get_text_config(), dtype)
    require_modes(described, is_invariant=is_invariant, has_packed_weights=quantization is not None)
    return _StepTracer(module, is_invariant, quantization)


def _require_paged(model: ModelSpec, caches: tuple[CacheSpec, ...], used: set[str]) -> None:
    """Raises SpecError if a layer bypasses our attention: such a layer would run and be silently wrong."""
    for cache in caches:
        if f"kv:{cache.name}" not in used:
            raise SpecError(
                "model.config.model_type",
                f"layer {cache.name} of {model.model_type!r} does not attend through transformers' AttentionInterface",
                "use another architecture",
            )


def _caches(model: ModelSpec, limits: ServingLimits) -> tuple[CacheSpec, ...]:
    return cache_specs(_hf_config(json.dumps(model.config)), limits, model.dtype)


@functools.lru_cache(maxsize=2)
def _hf_config(config_json: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**json.loads(config_json)).get_text_config()


def _export(module: nn.Module, args: tuple[torch.Tensor, ...], dynamic: Any = None) -> fx.GraphModule:
    graph_module: fx.GraphModule = export(module, args, dynamic).graph_module
    graph_module.graph.eliminate_dead_code()
    return graph_module


def _zeros(spec: TensorSpec) -> torch.Tensor:
    return torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
