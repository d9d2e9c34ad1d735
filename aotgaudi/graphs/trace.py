"""Entry -> traced program: the canonical texts of its pieces and how they are put together.

The build decides which artifacts run the pieces, so a traced program is the same for every target of a
dialect (`aotgaudi.graphs.dialect`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors.torch import save
from torch import fx, nn

from aotgaudi.entries import DecodeEntry, DefragEntry, Entry, MhcEntry, PromptEntry, SamplerEntry
from aotgaudi.errors import SpecError
from aotgaudi.graphs.canonical import to_text
from aotgaudi.graphs.dialect import ATEN, Dialect
from aotgaudi.graphs.export import export
from aotgaudi.graphs.forms import Form, form_of
from aotgaudi.graphs.hyper_connections import class_text
from aotgaudi.graphs.layer_reuse import reusing_layers
from aotgaudi.graphs.partition import PartitionedStep, Piece, partition_step
from aotgaudi.graphs.program import CacheSpec, TensorSpec
from aotgaudi.graphs.quantization import QUANTIZATIONS, Quantization
from aotgaudi.graphs.step import (
    StepEntry,
    build_model,
    cache_specs,
    described_by,
    export_step,
    step_inputs,
)
from aotgaudi.graphs.step_inputs import sampler_inputs
from aotgaudi.spec.hyper_connections import HyperConnections
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.model import ModelSpec
from aotgaudi.spec.parse import json_floats
from aotgaudi.spec.quantization import WeightsDtype

_PROLOGUE = "prologue"


@dataclass(frozen=True)
class TracedProgram:
    """A program before its pieces have artifacts. `constants` is a safetensors blob, or None."""

    inputs: tuple[TensorSpec, ...]
    weights: tuple[TensorSpec, ...]
    caches: tuple[CacheSpec, ...]
    pieces: tuple[Piece, ...]
    outputs: tuple[str, ...]
    constants: bytes | None


def trace(
    entry: Entry, model: ModelSpec, limits: ServingLimits, dialect: Dialect = ATEN, *, n_splits: int = 1
) -> TracedProgram:
    """Traces one entry. Raises SpecError or CompileError for a model or a graph that cannot be traced.

    `n_splits`: into how many partial sums a step splits the model's hyper-connections. An ``mhc`` entry says its own.
    """
    if isinstance(entry, (PromptEntry, DecodeEntry)):
        return _trace_step(entry, model, limits, dialect, n_splits)
    if isinstance(entry, SamplerEntry):
        return _trace_sampler(entry, model, dialect)
    if isinstance(entry, DefragEntry):
        return _trace_swap(entry, model, limits, form_of(dialect))
    if isinstance(entry, MhcEntry) and dialect == ATEN:
        return _trace_hyper_connection(entry, model)
    raise SpecError(
        f"entry {entry}",
        f"{entry.kind} graphs are enumerated, not built, by this version",
        "a spec without them, or the server whose graphs they are",
    )


def _trace_step(
    entry: StepEntry, model: ModelSpec, limits: ServingLimits, dialect: Dialect, n_splits: int
) -> TracedProgram:
    tracer = _tracer(json.dumps(model.config), model.dtype, model.weights_dtype, dialect)
    form, step = tracer.form, tracer.partition(entry, limits, n_splits)
    caches = _caches(model, limits, form)
    pieces = step.pieces
    used = {name for piece in pieces for name in piece.inputs}
    _require_paged(model, caches, used)
    specs = {spec.name: spec for spec in step_inputs(tracer.module, entry, limits, form)}
    taken = [name for name in specs if f"step:{name}" in used]
    made = form.made_by_prologue(taken)
    given = {name: specs[name] for name in taken if name not in made}
    prologue = form.prologue(entry, limits, model.dtype, made)
    if prologue is not None:
        module, takes = prologue
        given.update({spec.name: spec for spec in takes})
        outputs = tuple(f"{_PROLOGUE}.{number}" for number in range(len(made)))
        bound = {f"step:{name}": f"tmp:{output}" for name, output in zip(made, outputs, strict=True)}
        first = Piece(_text(module, *takes, finish=form.finish), _steps(*takes), outputs, _PROLOGUE)
        rest = (replace(p, inputs=tuple(bound.get(name, name) for name in p.inputs)) for p in pieces)
        pieces = (first, *rest)
    return TracedProgram(
        inputs=tuple(given.values()),
        weights=step.weights,
        caches=caches,
        pieces=pieces,
        outputs=step.outputs,
        constants=save(dict(sorted(step.constants.items()))) if step.constants else None,
    )


def _trace_sampler(entry: SamplerEntry, model: ModelSpec, dialect: Dialect) -> TracedProgram:
    if entry.batch_size == 0:
        raise SpecError(
            f"entry {entry}",
            "is another server's warm-up of an empty batch: enumerated, not built",
            "sampler.smallest_batch_size = 1",
        )
    specs = sampler_inputs(entry.batch_size, entry.signature, model.vocab_size, model.dtype, dialect)
    form = form_of(dialect)
    graph = form.sampler(entry.signature, entry.num_logprobs)
    outputs = tuple(f"0.{number}" for number in range(graph.num_outputs))
    exported = _export(graph, tuple(_zeros(spec) for spec in specs)).graph
    form.finish(exported)
    piece = Piece(to_text(exported), _steps(*specs), outputs, "sampler")
    return TracedProgram(
        inputs=specs, weights=(), caches=(), pieces=(piece,), outputs=outputs, constants=None
    )


def _trace_swap(entry: DefragEntry, model: ModelSpec, limits: ServingLimits, form: Form) -> TracedProgram:
    """The units of an exchange for each distinct form of a cache, called once for each cache of that form."""
    caches, n = _caches(model, limits, form), entry.padded_swaps
    specs = tuple(TensorSpec(name=name, shape=(n,), dtype="int64") for name in ("sources", "destinations"))
    texts: dict[tuple[object, ...], tuple[str, ...]] = {}
    pieces: list[Piece] = []
    for cache in caches:
        shape = cache.shape, cache.dtype
        if shape not in texts:
            texts[shape] = tuple(_exchange_texts(cache, specs, limits, form))
        passed: tuple[str, ...] = ()
        for text in texts[shape]:
            output = f"{len(pieces)}.0"
            pieces.append(Piece(text, (f"kv:{cache.name}", *passed, *_steps(*specs)), (output,), "swap"))
            passed = (f"tmp:{output}",)
    return TracedProgram(
        inputs=specs, weights=(), caches=caches, pieces=tuple(pieces), outputs=(), constants=None
    )


def _exchange_texts(
    cache: CacheSpec, specs: Sequence[TensorSpec], limits: ServingLimits, form: Form
) -> Iterator[str]:
    tensor, dynamic = form.cache_to_trace(cache)
    passed: tuple[torch.Tensor, ...] = ()
    for module in form.exchange(limits):
        args = (tensor, *passed, *(_zeros(spec) for spec in specs))
        graph = _export(module, args, (dynamic, *(None for _ in args[1:])) if dynamic else None).graph
        form.finish(graph)
        yield to_text(graph)
        passed = (module(*args),)


def _trace_hyper_connection(entry: MhcEntry, model: ModelSpec) -> TracedProgram:
    """The unit that all steps of the entry's class call, over as many tokens as the entry says.

    Its weights are inputs of the step, not of the checkpoint, so one program serves every layer. Attention and feed-forward
    entries give equal programs. Outputs: how to write a sublayer's output back, and the sublayer's input.
    """
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


def _text(module: nn.Module, *specs: TensorSpec, finish: Callable[[fx.Graph], None]) -> str:
    graph = _export(module, tuple(_zeros(spec) for spec in specs)).graph
    finish(graph)
    return to_text(graph)


def _steps(*specs: TensorSpec) -> tuple[str, ...]:
    return tuple(f"step:{spec.name}" for spec in specs)


def stored_names(module: nn.Module) -> Mapping[str, str]:
    """Returns the stored name of every tensor of a checkpoint. Tied tensors share the first one's name."""
    first: dict[int, str] = {}
    tensors = module.state_dict(keep_vars=True)
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}


class _StepTracer:
    """Traces the steps of one model. It reuses layers once a full trace has shown that the result is the same."""

    def __init__(self, module: Any, form: Form, quantization: Quantization | None) -> None:
        self.module, self.form, self._quantization = module, form, quantization
        self._stored = stored_names(module)
        self._can_reuse: dict[type[StepEntry], bool] = {}

    def partition(self, entry: StepEntry, limits: ServingLimits, n_splits: int) -> PartitionedStep:
        """Returns the step of `entry` in pieces."""
        kind = type(entry)
        if kind not in self._can_reuse:
            full = self._full(entry, limits, n_splits)
            guess = self._reusing(entry, limits, n_splits)
            self._can_reuse[kind] = (guess.pieces, guess.outputs) == (full.pieces, full.outputs)
            return full
        is_full = not self._can_reuse[kind]
        return (self._full if is_full else self._reusing)(entry, limits, n_splits)

    def _full(self, entry: StepEntry, limits: ServingLimits, n_splits: int) -> PartitionedStep:
        exported = export_step(
            self.module,
            entry,
            limits,
            n_splits=n_splits,
            form=self.form,
        )
        return partition_step(
            exported, self._stored, quantization=self._quantization, finish=self.form.finish
        )

    def _reusing(self, entry: StepEntry, limits: ServingLimits, n_splits: int) -> PartitionedStep:
        with reusing_layers(self.module):
            return self._full(entry, limits, n_splits)


@functools.lru_cache(maxsize=2)
def _tracer(
    config_json: str,
    dtype: str,
    weights_dtype: WeightsDtype | None,
    dialect: Dialect,
) -> _StepTracer:
    """Returns the tracer of a model. A build needs one; the second is for tests."""
    quantization = None if weights_dtype is None else QUANTIZATIONS[weights_dtype]
    module = build_model(json.loads(config_json), dtype)
    config, form = module.config.get_text_config(), form_of(dialect)
    form.require_built(
        config,
        described_by(config, dtype),
        has_packed_weights=quantization is not None,
    )
    return _StepTracer(module, form, quantization)


def _require_paged(model: ModelSpec, caches: tuple[CacheSpec, ...], used: set[str]) -> None:
    """Raises SpecError if a layer bypasses our attention: such a layer would run and be silently wrong."""
    for cache in caches:
        if f"kv:{cache.name}" not in used:
            raise SpecError(
                "model.config.model_type",
                f"layer {cache.name} of {model.model_type!r} does not attend through transformers' AttentionInterface",
                "use another architecture",
            )


def _caches(model: ModelSpec, limits: ServingLimits, form: Form) -> tuple[CacheSpec, ...]:
    return cache_specs(_hf_config(json.dumps(model.config)), limits, model.dtype, form)


@functools.lru_cache(maxsize=2)
def _hf_config(config_json: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**json_floats(json.loads(config_json))).get_text_config()


def _export(module: nn.Module, args: tuple[torch.Tensor, ...], dynamic: Any = None) -> fx.GraphModule:
    graph_module: fx.GraphModule = export(module, args, dynamic).graph_module
    graph_module.graph.eliminate_dead_code()
    return graph_module


def _zeros(spec: TensorSpec) -> torch.Tensor:
    return torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
