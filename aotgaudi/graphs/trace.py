"""Entry -> traced program: the canonical texts of its pieces and how they are put together.

What is not decided here is which artifacts answer the pieces: that is the build's business, so a traced
program is the same for every target.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save
from torch import fx, nn

from aotgaudi.errors import SpecError
from aotgaudi.graphs.canonical import to_text
from aotgaudi.graphs.program import TensorSpec
from aotgaudi.graphs.sampler import SamplerGraph
from aotgaudi.graphs.sampler_signature import signature_of
from aotgaudi.graphs.split import Piece, SplitStep, split_step
from aotgaudi.graphs.stamp import stamped
from aotgaudi.graphs.step import StepEntry, build_model, export_step, kv_shape, step_inputs
from aotgaudi.graphs.swap import SwapGraph
from aotgaudi.manifest.entries import DecodeEntry, DefragEntry, Entry, PromptEntry, SamplerEntry
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.model import ModelSpec


@dataclass(frozen=True)
class TracedProgram:
    """A program before its pieces have artifacts. `constants` is a safetensors blob, or None."""

    inputs: tuple[TensorSpec, ...]
    weights: tuple[TensorSpec, ...]
    caches: tuple[TensorSpec, ...]
    pieces: tuple[Piece, ...]
    outputs: tuple[str, ...]
    constants: bytes | None


def trace(entry: Entry, model: ModelSpec, limits: ServingLimits) -> TracedProgram:
    """Traces one entry. Raises SpecError for a model that cannot be, CompileError for a graph that cannot be."""
    if isinstance(entry, (PromptEntry, DecodeEntry)):
        return _trace_step(entry, model, limits)
    if isinstance(entry, SamplerEntry):
        return _trace_sampler(entry, model)
    return _trace_swap(entry, model, limits)


def _trace_step(entry: PromptEntry | DecodeEntry, model: ModelSpec, limits: ServingLimits) -> TracedProgram:
    tracer = _tracer(json.dumps(model.config), model.dtype)
    split = tracer.split(entry, limits)
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
    b = entry.batch_size
    specs = (
        TensorSpec(name="logits", shape=(b, model.vocab_size), dtype=model.dtype),
        TensorSpec(name="temperature", shape=(b,), dtype="float32"),
        TensorSpec(name="top_p", shape=(b,), dtype="float32"),
        TensorSpec(name="top_k", shape=(b,), dtype="int64"),
        TensorSpec(name="noise", shape=(b,), dtype="float64"),
    )
    signature = signature_of([(entry.temperature, entry.top_p, entry.top_k)])
    graph = _export(SamplerGraph(signature), tuple(_zeros(spec) for spec in specs))
    used = _prune_inputs(graph)
    kept = tuple(spec for spec, is_used in zip(specs, used, strict=True) if is_used)
    piece = Piece(to_text(graph.graph), tuple(f"step:{s.name}" for s in kept), ("0.0",), "sampler")
    return TracedProgram(
        inputs=kept, weights=(), caches=(), pieces=(piece,), outputs=("0.0",), constants=None
    )


def _trace_swap(entry: DefragEntry, model: ModelSpec, limits: ServingLimits) -> TracedProgram:
    caches, n = _caches(model, limits), entry.padded_swaps
    specs = tuple(TensorSpec(name=name, shape=(n,), dtype="int64") for name in ("sources", "destinations"))
    graph = _export(SwapGraph(), (_zeros(caches[0]), *(_zeros(spec) for spec in specs)))
    text = to_text(graph.graph)
    pieces = tuple(
        Piece(text, (f"kv:{layer}", "step:sources", "step:destinations"), (f"{layer}.0",), "swap")
        for layer in range(len(caches))
    )
    return TracedProgram(inputs=specs, weights=(), caches=caches, pieces=pieces, outputs=(), constants=None)


def stored_names(module: nn.Module) -> Mapping[str, str]:
    """Returns, for every tensor of a checkpoint, the name that it is stored under: the first of tied ones."""
    first: dict[int, str] = {}
    tensors = module.state_dict(keep_vars=True)
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}


class _StepTracer:
    """Traces the steps of one model; by stamping, where that has been seen to give what a full trace gives."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._stored = stored_names(module)
        self._can_stamp: dict[type[StepEntry], bool] = {}

    def split(self, entry: StepEntry, limits: ServingLimits) -> SplitStep:
        """Returns the step of `entry` in pieces."""
        kind = type(entry)
        if kind not in self._can_stamp:
            full = self._full(entry, limits)
            guess = self._stamped(entry, limits)
            self._can_stamp[kind] = (guess.pieces, guess.outputs) == (full.pieces, full.outputs)
            return full
        return self._stamped(entry, limits) if self._can_stamp[kind] else self._full(entry, limits)

    def _full(self, entry: StepEntry, limits: ServingLimits) -> SplitStep:
        return split_step(export_step(self.module, entry, limits), self._stored)

    def _stamped(self, entry: StepEntry, limits: ServingLimits) -> SplitStep:
        with stamped(self.module):
            return self._full(entry, limits)


@functools.lru_cache(maxsize=2)
def _tracer(config_json: str, dtype: str) -> _StepTracer:
    """Returns the tracer of a model; one model is enough for a build."""
    return _StepTracer(build_model(json.loads(config_json), dtype))


def _require_paged(model: ModelSpec, caches: tuple[TensorSpec, ...], used: set[str]) -> None:
    """Raises SpecError where a layer does not attend through us: it would run, and be silently wrong."""
    for cache in caches:
        if f"kv:{cache.name}" not in used:
            raise SpecError(
                "model.config.model_type",
                f"layer {cache.name} of {model.model_type!r} does not attend through transformers' AttentionInterface",
                "use another architecture",
            )


def _caches(model: ModelSpec, limits: ServingLimits) -> tuple[TensorSpec, ...]:
    config = _hf_config(json.dumps(model.config))
    shape = kv_shape(config, limits)
    return tuple(
        TensorSpec(name=str(n), shape=shape, dtype=model.dtype) for n in range(config.num_hidden_layers)
    )


@functools.lru_cache(maxsize=2)
def _hf_config(config_json: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**json.loads(config_json)).get_text_config()


def _export(module: nn.Module, args: tuple[torch.Tensor, ...]) -> fx.GraphModule:
    with torch.no_grad():
        graph_module: fx.GraphModule = torch.export.export(module, args, strict=False).graph_module
    graph_module.graph.eliminate_dead_code()
    return graph_module


def _prune_inputs(graph_module: fx.GraphModule) -> list[bool]:
    """Drops inputs that nothing uses; returns which were kept."""
    inputs = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    used = [bool(node.users) for node in inputs]
    for node in inputs:
        if not node.users:
            graph_module.graph.erase_node(node)
    return used


def _zeros(spec: TensorSpec) -> torch.Tensor:
    return torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
