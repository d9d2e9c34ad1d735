"""Compares traced steps with transformers' own model. Runs in a worker: it imports torch.

Both have the same random weights, and compute in float32. The traced pieces run uncompiled, over paged caches, on the
tensors that the server's runner makes of steps. The model is what transformers builds, with its own eager attention; nothing
of ours is in it. One sequence is longer than twice the longest window, and for each window (or chunk of attention, or
compressed stretch) another ends just behind it. They are prefilled in chunks of uneven lengths, two at a time, and decoded
together.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from aotgaudi.backends.base import version_of
from aotgaudi.bundle.receipt import ModelCheck
from aotgaudi.compile.model_reduction import (
    LENGTHS,
    MOST_PARAMETERS,
    ReducedModel,
    full_config,
    reduced_model,
)
from aotgaudi.digest import sha256_bytes
from aotgaudi.engine.runner import ProgramRunner
from aotgaudi.engine.steps import GREEDY_ROW, DecodeRow, DecodeStep, PromptRow, PromptStep, Step
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.errors import ModelDiffersError
from aotgaudi.graphs.canonical import from_text
from aotgaudi.graphs.dialect import Dialect
from aotgaudi.graphs.program import WEIGHT, Call, Program
from aotgaudi.graphs.quantization import QUANTIZATIONS
from aotgaudi.graphs.step import build_model
from aotgaudi.graphs.trace import TracedProgram, stored_names, trace
from aotgaudi.runtime.executables import BoundProgram, ExecutableTable
from aotgaudi.runtime.load import bind_weights
from aotgaudi.runtime.weights import WeightBinding, weight_bindings
from aotgaudi.spec.cache_rows import compressions_of, family_of
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.model import ModelSpec
from aotgaudi.spec.parse import json_floats
from aotgaudi.spec.quantization import WeightsDtype

TOLERANCE = 1e-4
"""The largest error allowed in a row of logits, relative to the row's largest value, which is about 5.
Rounding of float32 gives some 1e-6."""

_CHOOSING = ("aten.topk.", "aten.argmax.", "aotgaudi.choose_entries.")
"""Operators that choose. Where two scores are equal but for rounding, right graphs may choose otherwise than the model, and
all that follows differs. That happens with some weights, not with all, so only what differs with each seed is wrong."""

_MOST_PARAMETERS_AGAIN = 8 * MOST_PARAMETERS
_SEEDS = (0, 1, 2)
_GAIN, _GAIN_OF_TOKENS, _NOISE, _NOISE_OF_BUFFERS = 1.25, 2.0, 0.2, 0.1
_BLOCK_SIZE, _SHORTEST = 16, 20
_FRESH, _CHUNK, _NUM_ROWS, _NUM_DECODES = 32, 16, 4, 3

Span = tuple[int, int, int]
"""A sequence's number, the first token that a row has of it, and the one after the last."""


def compare_model(model: ModelSpec, dialect: Dialect) -> ModelCheck:
    """Returns what was compared. Raises ModelDiffersError, and SpecError like `trace`."""
    try:
        return _smallest(model, dialect)
    except ModelDiffersError:
        raise
    except Exception:
        with torch.device("meta"):
            build_model(model.config, "float32")  # Says in our words what is wrong with it.
        raise


def _smallest(model: ModelSpec, dialect: Dialect) -> ModelCheck:
    small = reduced_model(model, transformers_model, MOST_PARAMETERS)
    try:
        return _compared(small, dialect)
    except ModelDiffersError:
        raise
    except Exception:  # Perhaps the model does not work in sizes as small as these.
        larger = reduced_model(model, transformers_model, _MOST_PARAMETERS_AGAIN)
        if larger.reduced == small.reduced:
            raise
    return _compared(larger, dialect)


def _compared(small: ReducedModel, dialect: Dialect) -> ModelCheck:
    model = small.model
    difference = _difference(model, dialect)
    if difference is None:
        return ModelCheck(
            transformers=version_of("transformers"),
            tolerance=TOLERANCE,
            layers=small.layers,
            reduced=small.reduced,
        )
    number = len(small.layers) - 1
    for num_layers in range(1, len(small.layers)):
        found = _difference(small.first(num_layers), dialect)
        if found is not None:
            number, difference = num_layers - 1, found
            break
    raise ModelDiffersError(
        f"model {model.model_type!r}: its graphs are not what transformers {version_of('transformers')} computes: from layer"
        f" {number} ({small.layers[number]}) on, logits of {difference.step} differ by {difference.error:.2g}, allowed"
        f" {difference.allowed:.2g}; nothing of it is compiled (use another architecture)"
    )


def transformers_model(config: Mapping[str, Any]) -> Any:
    """Returns transformers' own model of a config.json, in float32, with the weights that transformers gives it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**json_floats(dict(config))), dtype=torch.float32, attn_implementation="eager"
    ).eval()


def fill(model: Any, seed: int) -> None:
    """Gives a model random weights with which every part of it matters.

    Products keep the scale of what they multiply. Other weights (norms, biases, sinks) lie around 0 or 1, as transformers
    makes them, and differ from it. The numbers follow from a weight's name, so the first layers of a longer model have the
    same.
    """
    num_tokens = model.get_input_embeddings().weight.shape[0]
    for name, parameter in model.named_parameters():
        noise = _noise(name, parameter.shape, seed)
        if parameter.dim() > 1:
            width = parameter.shape[-1] if parameter.dim() == 2 else math.prod(parameter.shape[-2:]) ** 0.5
            gain = _GAIN_OF_TOKENS if parameter.shape[0] == num_tokens else _GAIN
            parameter.data = noise * (gain / math.sqrt(width))
        else:
            parameter.data = _NOISE * noise + (1.0 if parameter.data.mean().item() > 0.5 else 0.0)
    stored = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in stored and buffer.is_floating_point():
            buffer.data = buffer.data + _NOISE_OF_BUFFERS * _noise(name, buffer.shape, seed)
        elif name in stored and buffer.dim() == 2:  # The experts of each token; none twice.
            order = _noise(name, (len(buffer), model.config.n_routed_experts), seed).argsort(-1)
            buffer.data = order[:, : buffer.shape[1]]
    model.tie_weights()
    model.requires_grad_(requires_grad=False)


def _noise(name: str, shape: Sequence[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    return torch.randn(tuple(shape), generator=generator)


@dataclass(frozen=True)
class _Difference:
    """The error of a row, what is allowed there, and what the step was."""

    error: float
    allowed: float
    step: str

    @property
    def ratio(self) -> float:
        """How much of what is allowed the error is; infinite where something is not a number."""
        if self.error == 0.0:
            return 0.0
        ratio = self.error / self.allowed if self.allowed > 0 else math.inf
        return math.inf if math.isnan(ratio) else ratio


def _difference(model: ModelSpec, dialect: Dialect) -> _Difference | None:
    """Returns the largest difference between graphs and model; None if a right graph could differ as much."""
    case, found = _Case.of(model, dialect), None
    for seed in _SEEDS if case.chooses else _SEEDS[:1]:
        found = case.worst(seed)
        if found.ratio <= 1:
            return None
    return found


@dataclass(frozen=True)
class _Sequence:
    tokens: tuple[int, ...]
    table: tuple[int, ...]


@dataclass(frozen=True)
class _Case:
    """A model's traced programs, and sequences to run through them."""

    model: ModelSpec
    programs: Mapping[PromptEntry | DecodeEntry, TracedProgram]
    limits: ServingLimits
    sequences: tuple[_Sequence, ...]

    @classmethod
    def of(cls, model: ModelSpec, dialect: Dialect) -> _Case:
        """Traces the steps. Raises like `trace`."""
        bounds, size = _bounds(model)
        sequences = tuple(_sequences(model, bounds, size))
        num_blocks = sequences[-1].table[-1]
        limits = ServingLimits(
            max_num_seqs=_NUM_ROWS,
            max_num_batched_tokens=max(2 * _CHUNK, size),
            max_model_len=len(sequences[0].table) * size,
            block_size=size,
            num_blocks=num_blocks,
        )
        fresh, chunk = PromptEntry(1, _FRESH, 0), PromptEntry(2, _CHUNK, len(sequences[0].table))
        entries = fresh, chunk, DecodeEntry(_NUM_ROWS, 1, num_blocks)
        programs = {entry: trace(entry, model, limits, dialect) for entry in entries}
        return cls(model, programs, limits, sequences)

    @property
    def chooses(self) -> bool:
        """Whether a graph chooses."""
        texts = (piece.text for program in self.programs.values() for piece in program.pieces)
        return any(name in text for text in texts for name in _CHOOSING)

    @torch.no_grad()
    def worst(self, seed: int) -> _Difference:
        """Returns the largest difference, by what is allowed, with the weights of `seed`."""
        model = transformers_model(self.model.config)
        fill(model, seed)
        runner = self._runner(model)
        tokens = (torch.tensor([each.tokens]) for each in self.sequences)
        expected = [model(input_ids=ids, use_cache=False).logits[0].float() for ids in tokens]
        found = [_Difference(0.0, 0.0, "")]
        for name, step, spans in self._steps():
            for row, (number, _, end) in zip(runner.logits(step), spans, strict=False):
                wanted = expected[number][end - 1]
                error, largest = (row.float() - wanted).abs().amax(), wanted.abs().amax()
                found.append(_Difference(error.item(), TOLERANCE * largest.item(), name))
        return max(found, key=lambda each: each.ratio)

    def _runner(self, model: Any) -> ProgramRunner:
        """Returns a runner over the weights of `model`. If graphs take packed ones, `model` gets what these stand for."""
        table, units, tensors = ExecutableTable(), dict[str, _Unit](), dict[str, Tensor]()
        programs = {entry: _program(traced, units) for entry, traced in self.programs.items()}
        bindings = list(weight_bindings(programs.values()))
        tensors.update(bind_weights(bindings, dict(model.state_dict()), lambda _, tensor: tensor))
        if self.model.weights_dtype is not None:
            _round_weights(model, bindings, self.model.weights_dtype)
        for entry, traced in self.programs.items():
            if traced.constants:
                tensors.update(
                    {f"const:{name}": each for name, each in load_tensors(traced.constants).items()}
                )
            for cache in traced.caches:
                sizes = cache.sizes(self.limits.num_blocks)
                zeros = torch.zeros(sizes, dtype=getattr(torch, cache.dtype))
                tensors.setdefault(f"kv:{cache.name}", zeros)
            table.add(entry, BoundProgram(programs[entry], units, tensors))
        return ProgramRunner(table, self.limits.block_size)

    def _steps(self) -> Iterator[tuple[str, Step, list[Span]]]:
        """Yields steps with their names, and what their rows have."""
        fresh, chunk, decode = self.programs  # In the order of `of`.
        ends = [len(each.tokens) - _NUM_DECODES for each in self.sequences]
        at = [0 for _ in ends]
        at[0] = _FRESH - 5
        yield "a prompt", self._prompt(fresh, [(0, 0, at[0])]), [(0, 0, at[0])]
        while rows := [n for n in range(len(at)) if at[n] < ends[n]][: chunk.batch_size]:
            spans = [(n, at[n], min(ends[n], at[n] + _CHUNK - (at[n] + n) % 3)) for n in rows]
            yield "a prompt's chunk", self._prompt(chunk, spans), spans
            for n, _, end in spans:
                at[n] = end
        for number in range(_NUM_DECODES):
            spans = [(n, end + number, end + number + 1) for n, end in enumerate(ends)]
            yield "a decode", self._decode(decode, spans), spans

    def _prompt(self, entry: Any, spans: list[Span]) -> PromptStep:
        rows = []
        for number, start, end in spans:
            each = self.sequences[number]
            rows.append(PromptRow(each.tokens[start:end], start, each.table, None))
        return PromptStep(entry, tuple(rows))

    def _decode(self, entry: Any, spans: list[Span]) -> DecodeStep:
        rows = []
        for number, at, _ in spans:
            each = self.sequences[number]
            rows.append(DecodeRow(each.tokens[at], at, each.table, GREEDY_ROW))
        return DecodeStep(entry, tuple(rows))


def _bounds(model: ModelSpec) -> tuple[list[int], int]:
    """Returns after how many tokens layers of the model compute otherwise, ascending, and a block size that suits them."""
    full, size = full_config(model.config), _BLOCK_SIZE
    said = (getattr(full, name, None) for name in LENGTHS)  # 0 says that there is none (qwen2_moe).
    found = {_SHORTEST, *(length for length in said if type(length) is int and length > 0)}
    if family_of(model) == "compressed":
        rates = {each.every for each in compressions_of(model) if each is not None}
        size = math.lcm(size, *rates)
        found |= {rate for rate in rates if rate > _SHORTEST}
    return sorted(found)[1 - _NUM_ROWS :], size


def _sequences(model: ModelSpec, bounds: Sequence[int], block_size: int) -> Iterator[_Sequence]:
    """Yields random sequences over blocks of their own: one beyond all bounds, then one just beyond each."""
    num_tokens, first = full_config(model.config).vocab_size, 1
    noise = torch.Generator().manual_seed(0)
    for length in (2 * bounds[-1] + _FRESH, *(bound + 2 for bound in bounds)):
        num_blocks = -(-length // block_size)
        tokens = torch.randint(min(3, num_tokens - 1), num_tokens, (length,), generator=noise)
        yield _Sequence(tuple(tokens.tolist()), tuple(range(first, first + num_blocks)))
        first += num_blocks


class _Unit:
    """Runs a unit's text without compiling it."""

    def __init__(self, text: str) -> None:
        self._graph, _ = from_text(text)

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        return list(self._graph(*inputs))


def _program(traced: TracedProgram, units: dict[str, _Unit]) -> Program:
    """Returns a traced program, and adds its pieces to `units`."""
    calls = []
    for piece in traced.pieces:
        key = sha256_bytes(piece.text.encode())
        if key not in units:
            units[key] = _Unit(piece.text)
        calls.append(Call(unit=key, inputs=piece.inputs, outputs=piece.outputs))
    return Program(
        inputs=traced.inputs,
        weights=traced.weights,
        caches=traced.caches,
        calls=tuple(calls),
        outputs=traced.outputs,
    )


def _round_weights(model: Any, bindings: Sequence[WeightBinding], dtype: WeightsDtype) -> None:
    """Gives the linear layers that take packed weights the weights that these stand for."""
    quantization, stored = QUANTIZATIONS[dtype], stored_names(model)
    packed = {name for binding in bindings if binding.source != WEIGHT for name in binding.names}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and stored[f"{name}.weight"] in packed:
            weight = quantization.unpack(*quantization.pack(module.weight.data, name))
            module.weight = nn.Parameter(weight, requires_grad=False)
