"""Tracing: every architecture in eager form, stamping, sharing, and what is refused."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_tensors

from aotgaudi.engine.runner import ProgramRunner
from aotgaudi.entries import DecodeEntry, DefragEntry, Entry, PromptEntry, SamplerEntry
from aotgaudi.errors import SpecError
from aotgaudi.graphs.canonical import from_text, to_text
from aotgaudi.graphs.dialect import ATEN, Dialect
from aotgaudi.graphs.layer_reuse import renumbered, reusing_layers
from aotgaudi.graphs.mixers.base import paged_attention
from aotgaudi.graphs.partition import partition_step
from aotgaudi.graphs.program import CacheSpec, Call, Program
from aotgaudi.graphs.step import build_model, export_step
from aotgaudi.graphs.trace import TracedProgram, stored_names, trace
from aotgaudi.runtime.executables import BoundProgram, ExecutableTable
from aotgaudi.runtime.weights import weight_bindings
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.model import ModelSpec
from tests.integration.models import ARCHITECTURES, BLOCK_SIZE, reference, spec_of
from tests.integration.test_right_answers import CHUNK, DECODE, FRESH, SWAP, TOLERANCE, Conversation

pytestmark = pytest.mark.slow

ENTRIES = (FRESH, CHUNK, DECODE)


class Eager:
    """Runs a unit's canonical text without compiling it."""

    def __init__(self, text: str) -> None:
        self._graph, _ = from_text(text)

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            return list(self._graph(*inputs))


@functools.lru_cache(maxsize=8)
def traced_of(spec_json: str, entry: Entry, dialect: Dialect) -> TracedProgram:
    """Returns an entry's program. Models that differ in their weights alone share it."""
    spec = BuildSpec.model_validate_json(spec_json)
    return trace(entry, spec.model, spec.limits, dialect)


def eager_runner(
    model: Any,
    entries: Sequence[Entry] = ENTRIES,
    *,
    block_size: int = BLOCK_SIZE,
    dialect: Dialect = ATEN,
    load: Callable[[str], Any] = Eager,
    put: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.contiguous,
) -> ProgramRunner:
    """Returns a runner over the traced programs of a model.

    `load` makes a unit of its text, by default uncompiled. `put` brings weights, constants and caches to where units run.
    """
    spec = spec_of(model, block_size=block_size)
    limits = spec.limits
    table, spec_json = ExecutableTable(), spec.model_dump_json(by_alias=True)
    table.declare_samplers(entries)
    state, units, tensors = model.state_dict(), dict[str, Any](), dict[str, torch.Tensor]()
    for entry in entries:
        traced = traced_of(spec_json, entry, dialect)
        keys = [hashlib.sha256(piece.text.encode()).hexdigest() for piece in traced.pieces]
        units.update({k: load(p.text) for k, p in zip(keys, traced.pieces, strict=True) if k not in units})
        if traced.constants:
            tensors.update({f"const:{n}": put(t) for n, t in load_tensors(traced.constants).items()})
        for cache in traced.caches:
            if f"kv:{cache.name}" not in tensors:
                tensor = put(torch.zeros(cache.sizes(limits.num_blocks)))
                tensors[f"kv:{cache.name}"] = tensor
                table.caches.append(tensor)
        calls = tuple(
            Call(unit=k, inputs=p.inputs, outputs=p.outputs) for k, p in zip(keys, traced.pieces, strict=True)
        )
        program = Program(
            inputs=traced.inputs,
            weights=traced.weights,
            caches=traced.caches,
            calls=calls,
            outputs=traced.outputs,
        )
        for binding in weight_bindings([program]):
            tensors[binding.text] = put(torch.cat([state[name] for name in binding.names]))
        table.add(entry, BoundProgram(program, units, tensors))
    return ProgramRunner(table, block_size)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_traced_programs_compute_what_transformers_computes(architecture: str) -> None:
    model = reference(architecture)

    assert worst_error(model, eager_runner(model)) < TOLERANCE


CLOSE = 5e-5
"""The largest error of logits up to 5 in float32, however the sequence is cut."""


@pytest.mark.parametrize("architecture", ["deepseek_v3", "deepseek_v4"])
def test_chunks_from_any_token_and_decodes_of_mixed_lengths_while_blocks_are_exchanged(
    architecture: str,
) -> None:
    """Chunks begin and end inside of blocks and, in V4, inside of the windows that layers compress."""
    model = reference(architecture)
    talk = Conversation(model, eager_runner(model, (*ENTRIES, SWAP)))
    errors = [
        talk.prompt(FRESH, (0, 0, 32)),
        talk.prompt(FRESH, (3, 0, 19)),
        talk.prompt(CHUNK, (0, 32, 16), (3, 19, 7)),
        talk.prompt(CHUNK, (3, 26, 3), (1, 0, 15)),
        talk.prompt(CHUNK, (1, 15, 1), (0, 48, 5)),
        talk.prompt(CHUNK, (3, 29, 15)),
    ]
    positions = {0: 53, 1: 16, 3: 44}

    for step in range(20):
        if step in (3, 11):
            talk.swap(talk.tables[0][step // 4], talk.tables[3][1])
            talk.swap(talk.tables[1][0], 40)
        rows = [0, 1, 3] if step % 5 else [3, 0]
        errors.append(talk.decode(*((row, positions[row]) for row in rows)))
        positions = {row: position + (row in rows) for row, position in positions.items()}

    assert max(errors) < CLOSE


def worst_error(model: Any, runner: ProgramRunner, decode: DecodeEntry = DECODE) -> float:
    """Returns the largest error of a conversation's logits."""
    talk = Conversation(model, runner, decode)
    return max(
        talk.prompt(FRESH, (0, 0, 32)),
        talk.prompt(FRESH, (1, 0, 32)),
        talk.prompt(CHUNK, (0, 32, 16), (1, 32, 7)),
        talk.prompt(CHUNK, (0, 48, 16), (3, 0, 16)),
        talk.decode((1, 39), (0, 64)),
        talk.decode((3, 16)),
        talk.decode((0, 65), (3, 17), (1, 39)),
    )


@pytest.mark.parametrize(
    "architecture", ["llama", "gemma3_text", "gpt_oss", "mixtral", "deepseek_v3", "deepseek_v4"]
)
@pytest.mark.parametrize("entry", [FRESH, CHUNK, DECODE])
def test_stamping_gives_what_a_full_trace_gives(architecture: str, entry: PromptEntry | DecodeEntry) -> None:
    spec = spec_of(reference(architecture))
    module = build_model(spec.model.config, "float32")
    names = stored_names(module)

    full = partition_step(export_step(module, entry, spec.limits), names)
    with reusing_layers(module):
        stamps = partition_step(export_step(module, entry, spec.limits), names)

    assert stamps.pieces == full.pieces
    assert stamps.outputs == full.outputs
    assert stamps.weights == full.weights


def test_a_model_that_does_not_export_is_refused_though_torch_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = spec_of(reference("llama"))
    module = build_model(spec.model.config, "float32")

    def refuse(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr("aotgaudi.graphs.step.export", refuse)
    with pytest.raises(SpecError, match="does not export: NotImplementedError"):
        export_step(module, DECODE, spec.limits)


def test_every_unit_of_a_program_round_trips_through_its_text() -> None:
    spec = spec_of(reference("llama"))

    for piece in trace(DECODE, spec.model, spec.limits).pieces:
        graph, inputs = from_text(piece.text)
        if any(isinstance(size, str) for _, sizes, _ in inputs for size in sizes):
            continue  # An open size has no sample; the compiler's tests export such graphs again.
        args = tuple(torch.empty_strided(s, d, dtype=getattr(torch, t)) for t, s, d in inputs)
        again = torch.export.export(graph, tuple(a.zero_() for a in args), strict=False)
        assert to_text(again.graph_module.graph) == piece.text


def test_what_comes_before_the_layers_does_not_depend_on_the_context() -> None:
    spec = spec_of(reference("llama"))

    texts = {trace(PromptEntry(1, 32, c), spec.model, spec.limits).pieces[0].text for c in (0, 1, 4)}

    assert len(texts) == 1


def test_tied_weights_are_asked_for_once() -> None:
    model = reference("gemma3_text")
    spec = spec_of(model)

    names = {weight.name for weight in trace(DECODE, spec.model, spec.limits).weights}

    assert "lm_head.weight" not in names
    assert "model.embed_tokens.weight" in names


def test_a_swap_is_one_unit_called_once_a_layer() -> None:
    spec = spec_of(reference("llama"))

    traced = trace(DefragEntry(8), spec.model, spec.limits)

    assert len({piece.text for piece in traced.pieces}) == 1
    assert [piece.inputs[0] for piece in traced.pieces] == ["kv:0", "kv:1", "kv:2"]


def test_caches_of_another_form_are_exchanged_by_another_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(reference("llama"))
    forms = {"0": (2, 16, 16), "0.raw": (1, 16, 4), "1": (2, 16, 16), "2": (1, 16, 4)}
    caches = tuple(
        CacheSpec(name=name, shape=(planes, "num_blocks + 1", 1, rows, width), dtype="float32")
        for name, (planes, rows, width) in forms.items()
    )
    monkeypatch.setattr("aotgaudi.graphs.trace._caches", lambda *_: caches)

    traced = trace(DefragEntry(8), spec.model, spec.limits)

    texts = [piece.text for piece in traced.pieces]
    assert [piece.inputs[0] for piece in traced.pieces] == ["kv:0", "kv:0.raw", "kv:1", "kv:2"]
    assert (texts[0], texts[1]) == (texts[2], texts[3])
    assert texts[0] != texts[1]
    assert len({name for piece in traced.pieces for name in piece.outputs}) == 4


def test_a_sampler_takes_only_what_its_signature_needs() -> None:
    spec = spec_of(reference("llama"))

    greedy = trace(SamplerEntry(2, 0.0, 1.0, 0, True), spec.model, spec.limits)
    filtered = trace(SamplerEntry(2, 0.7, 0.9, 50, True), spec.model, spec.limits)

    assert [spec.name for spec in greedy.inputs] == ["logits"]
    assert [spec.name for spec in filtered.inputs] == ["logits", "temperature", "top_p", "top_k", "noise"]
    assert greedy.outputs == filtered.outputs == ("0.0",)


def test_penalties_and_log_probabilities_add_inputs_and_outputs() -> None:
    spec = spec_of(reference("llama"))
    setting = SamplerEntry(2, 0.0, 1.0, 0, True, repetition_penalty=1.2, num_logprobs=5)

    traced = trace(setting, spec.model, spec.limits)

    assert [spec.name for spec in traced.inputs] == [
        "logits",
        *(f"{kind}_penalty" for kind in ("presence", "frequency", "repetition")),
        "output_counts",
        "prompt_mask",
    ]
    assert [spec.shape for spec in traced.inputs[-2:]] == [(2, spec.model.vocab_size)] * 2
    assert traced.outputs == traced.pieces[0].outputs == ("0.0", "0.1", "0.2", "0.3")


def test_an_empty_batch_is_enumerated_and_not_built() -> None:
    spec = spec_of(reference("llama"))

    with pytest.raises(SpecError, match="smallest_batch_size = 1"):
        trace(SamplerEntry(0, 0.0, 1.0, 0, True), spec.model, spec.limits)


class _Module:
    layer_idx = 3


def test_an_unknown_attention_keyword_is_an_error_that_names_it() -> None:
    q = torch.zeros(1, 4, 2, 16)

    with pytest.raises(SpecError, match=r"_Module, layer 3.*'alibi_slopes'"):
        paged_attention(_Module(), q, q, q, None, paged=None, alibi_slopes=torch.ones(4))


def test_a_mask_of_the_models_own_is_an_error() -> None:
    q = torch.zeros(1, 4, 2, 16)

    with pytest.raises(SpecError, match="its own attention mask"):
        paged_attention(_Module(), q, q, q, torch.ones(1), paged=None)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_batch_is_an_error_that_names_it(rope_type: str) -> None:
    config = {**spec_of(reference("llama")).model.config}
    config["rope_parameters"] = {
        "rope_type": rope_type,
        "rope_theta": 10000.0,
        "factor": 2.0,
        "long_factor": [1.0] * 8,
        "short_factor": [1.0] * 8,
        "original_max_position_embeddings": 512,
    }

    with pytest.raises(SpecError, match=f"{rope_type}.*ahead of time"):
        build_model(config, "float32")


@pytest.mark.parametrize("model_type", ["no_such_model", "vit", "bert", "bloom", "mamba"])
def test_an_architecture_that_cannot_be_served_is_an_error_that_names_it(model_type: str) -> None:
    spec = spec_of(reference("llama"))

    config = {"model_type": model_type, "num_hidden_layers": 2, "vocab_size": 320, "hidden_size": 64}
    model = ModelSpec(name="x", dtype="float32", config=config)

    with pytest.raises(SpecError, match=f"(?i){model_type}"):
        trace(DECODE, model, spec.limits)


def test_a_config_value_of_the_wrong_type_is_an_error_that_names_it() -> None:
    config = {**spec_of(reference("llama")).model.config, "hidden_size": "64"}

    with pytest.raises(SpecError, match="hidden_size"):
        build_model(config, "float32")


@pytest.mark.parametrize(
    ("binding", "expected"),
    [
        ("weight:model.layers.1.mlp.up_proj.weight", "weight:model.layers.11.mlp.up_proj.weight"),
        ("const:model.layers.1.self_attn.scale", "const:model.layers.11.self_attn.scale"),
        ("weight:model.layers.12.mlp.up_proj.weight", "weight:model.layers.12.mlp.up_proj.weight"),
        (
            "weight:model.layers.1.q_proj.weight+model.layers.1.k_proj.weight",
            "weight:model.layers.11.q_proj.weight+model.layers.11.k_proj.weight",
        ),
        ("weight:model.norm.weight", "weight:model.norm.weight"),
        ("kv:1", "kv:11"),
        ("kv:2", "kv:2"),
        ("kv:1.raw", "kv:11.raw"),
        ("kv:11", "kv:11"),
        ("step:slots", "step:slots"),
        ("tmp:0.1", "tmp:0.1"),
    ],
)
def test_renumbering_changes_the_layers_own_tensors_only(binding: str, expected: str) -> None:
    assert renumbered(binding, 1, 11) == expected
