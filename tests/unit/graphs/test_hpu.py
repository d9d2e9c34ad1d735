"""The hpu dialect: right before it is compiled, static, and in the forms that the bridge takes. No bridge is needed here."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bundle.programs import ProgramChecks
from aotgaudi.entries import DecodeEntry, Entry, PromptEntry, SamplerEntry
from aotgaudi.errors import SpecError
from aotgaudi.graphs.dialect import Dialect
from aotgaudi.graphs.program import Call, Program
from aotgaudi.graphs.sample_sorted import sample_sorted
from aotgaudi.graphs.sample_tokens import sample_tokens
from aotgaudi.graphs.trace import TracedProgram, trace
from aotgaudi.spec.parse import spec_from_json
from tests.integration.models import reference, spec_of
from tests.integration.test_right_answers import CHUNK, FRESH, SWAP, TOLERANCE, Conversation
from tests.unit.graphs.test_trace import eager_runner, worst_error

pytestmark = pytest.mark.slow

DECODE = DecodeEntry(4, 1, 48)
"""More blocks than the cache has: a contiguous decode reads those that there are."""
GATHERED, CONTIGUOUS = Dialect("hpu"), Dialect("hpu", is_contiguous=True)
SAMPLER = SamplerEntry(
    2,
    0.7,
    0.9,
    50,
    True,
    top_n_sigma=1.0,
    repetition_penalty=1.2,
    num_logprobs=3,
    constraints=True,
)
ENTRIES: tuple[Entry, ...] = (FRESH, CHUNK, DECODE, SWAP, SAMPLER)


@functools.lru_cache
def traced(entry: Entry, dialect: Dialect = CONTIGUOUS, architecture: str = "llama") -> TracedProgram:
    spec = spec_of(reference(architecture))
    return trace(entry, spec.model, spec.limits, dialect)


def lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()[1:]]


@pytest.mark.parametrize(
    ("architecture", "dialect"), [("llama", GATHERED), ("llama", CONTIGUOUS), ("gemma3_text", CONTIGUOUS)]
)
def test_its_programs_compute_what_transformers_computes(architecture: str, dialect: Dialect) -> None:
    model = reference(architecture)

    runner = eager_runner(model, (FRESH, CHUNK, DECODE), dialect=dialect)

    assert worst_error(model, runner, DECODE) < TOLERANCE


def test_an_exchange_moves_a_sequence_and_nothing_else() -> None:
    model = reference("llama")
    talk = Conversation(model, eager_runner(model, (FRESH, DECODE, SWAP), dialect=CONTIGUOUS), DECODE)
    talk.prompt(FRESH, (0, 0, 32))
    talk.prompt(FRESH, (2, 0, 32))

    talk.swap(talk.tables[0][1], talk.tables[2][0])
    talk.swap(talk.tables[0][0], 40)

    assert talk.decode((0, 32), (2, 32)) < TOLERANCE


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.kind)
def test_every_size_of_every_unit_is_a_number(entry: Entry) -> None:
    sizes = [
        size
        for piece in traced(entry, architecture="gemma3_text").pieces
        for line in lines(piece.text)
        if line[0] == "input"
        for size in (*line[2], *line[3])
    ]

    assert sizes
    assert all(isinstance(size, int) for size in sizes)


def test_every_cache_is_an_input_that_is_written_once_whole_and_only_there() -> None:
    """K-21: else the bridge copies the cache."""
    for entry in (FRESH, CHUNK, DECODE, SWAP):
        for piece in traced(entry).pieces:
            caches = {n for n, binding in enumerate(piece.inputs) if binding.startswith("kv:")}
            written: Counter[int] = Counter()
            for line in lines(piece.text):
                if line[0] == "call" and line[1] == "aten.index_copy_.default":
                    written[line[2][0]["%"]] += 1
            reads_only = entry is SWAP and "index_select" in piece.text
            assert written == Counter(() if reads_only else caches)


def test_equal_layers_are_one_unit_and_what_comes_before_them_does_not_depend_on_the_context() -> None:
    programs = [traced(PromptEntry(1, 32, context)) for context in (0, 1, 4)]

    embeddings = {
        piece.text for program in programs for piece in program.pieces if piece.label == "embedding"
    }
    layers = [{piece.text for piece in program.pieces if piece.label == "layer"} for program in programs]

    assert len(embeddings) == 1
    assert [len(texts) for texts in layers] == [1, 1, 1]


@pytest.mark.parametrize(
    ("entry", "architecture", "labels"),
    [
        (FRESH, "llama", []),
        (CHUNK, "llama", ["prologue"]),
        (DECODE, "llama", ["prologue"]),
        (PromptEntry(1, 16, 0), "gemma3_text", []),
        (PromptEntry(1, 32, 0), "gemma3_text", ["prologue"]),
    ],
)
def test_a_prologue_makes_masks_where_causal_attention_does_not_do(
    entry: Entry, architecture: str, labels: list[str]
) -> None:
    """The window of the second model is 20 tokens."""
    program = traced(entry, architecture=architecture)

    assert [piece.label for piece in program.pieces if piece.label == "prologue"] == labels
    assert not any(spec.dtype == "bool" for spec in program.inputs)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.kind)
def test_its_programs_are_those_that_a_server_can_run(entry: Entry) -> None:
    spec = spec_of(reference("llama")).to_json()
    spec["target"] = {"backend": "hpu"}
    spec["bucketing"]["contiguous_pa"] = True
    program = traced(entry)
    sealed = Program(
        inputs=program.inputs,
        weights=program.weights,
        caches=program.caches,
        calls=tuple(
            Call(
                unit=hashlib.sha256(piece.text.encode()).hexdigest(),
                inputs=piece.inputs,
                outputs=piece.outputs,
            )
            for piece in program.pieces
        ),
        outputs=program.outputs,
        constants=None if program.constants is None else "sha256:" + 64 * "0",
    )

    on_hpu, on_cpu = ProgramChecks(spec_from_json(spec)), ProgramChecks(spec_of(reference("llama")))

    assert on_hpu.problem(sealed) is None
    assert on_hpu.entry_problem(sealed, entry) is None
    assert on_cpu.problem(sealed) or on_cpu.entry_problem(sealed, entry)


def test_a_contiguous_decode_reads_no_list_of_blocks() -> None:
    names = {
        dialect: {spec.name for spec in traced(DECODE, dialect).inputs} for dialect in (GATHERED, CONTIGUOUS)
    }

    assert names[GATHERED] - names[CONTIGUOUS] == {"block_list", "block_rows", "block_ends"}
    assert names[CONTIGUOUS] - names[GATHERED] == {"pool_rows", "pool_ends"}


@pytest.mark.parametrize(
    ("architecture", "named"), [("mixtral", "experts"), ("deepseek_v3", "latent"), ("gemma2", "softcap")]
)
def test_models_that_were_not_shown_are_refused_by_name(architecture: str, named: str) -> None:
    with pytest.raises(SpecError, match=rf"{named}.*not built for hpu"):
        traced(FRESH, architecture=architecture)


def test_float16_is_refused_by_name() -> None:
    spec = spec_of(reference("llama"), dtype="float16")

    with pytest.raises(SpecError, match=r"float16.*not built for hpu"):
        trace(FRESH, spec.model, spec.limits, CONTIGUOUS)


def test_a_sampler_takes_noise_that_the_device_has() -> None:
    noise = [spec.dtype for spec in traced(SAMPLER).inputs if spec.name == "noise"]

    assert noise == ["float32"]


rows = st.lists(st.integers(-40, 40).map(lambda number: number / 8), min_size=6, max_size=6)
probabilities = st.integers(0, 63).map(lambda number: number / 64)


@given(
    logits=st.lists(rows, min_size=2, max_size=2),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_k=st.integers(0, 7),
    top_p=st.integers(1, 64).map(lambda number: number / 64),
    min_p=probabilities,
    noise=st.lists(probabilities, min_size=2, max_size=2),
)
def test_it_draws_from_the_tokens_that_the_definition_keeps(
    logits: list[list[float]], temperature: float, top_k: int, top_p: float, min_p: float, noise: list[float]
) -> None:
    """And a greedy row gets the same token. The definition's tokens are those that some noise gives."""
    filters = torch.tensor([top_k] * 2), torch.tensor([top_p] * 2), torch.tensor([min_p] * 2)
    scores, heat = torch.tensor(logits), torch.tensor([temperature] * 2)

    found = sample_sorted(scores, heat, torch.tensor(noise), *filters)

    kept = [set(), set()]  # type: list[set[int]]
    for step in range(512):
        tokens = sample_tokens(scores, heat, torch.tensor([step / 512] * 2, dtype=torch.float64), *filters)
        for row, token in enumerate(tokens.tolist()):
            kept[row].add(token)
    least = [min(scores[row, token].item() for token in kept[row]) for row in range(2)]
    assert all(scores[row, token].item() >= least[row] - 0.13 for row, token in enumerate(found.tolist()))


def test_noise_from_0_to_1_gives_each_token_its_share() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    noise = (torch.arange(1000) + 0.5) / 1000

    tokens = sample_sorted(logits.expand(1000, 4), torch.ones(1000), noise, None, None, None)

    shares = torch.bincount(tokens, minlength=4) / 1000
    assert torch.allclose(shares, torch.softmax(logits[0], -1), atol=2e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_without_a_finite_maximum_gets_token_0(value: float) -> None:
    logits = torch.tensor([[1.0, value, 2.0]])

    token = sample_sorted(logits, torch.ones(1), torch.tensor([0.5]), None, None, None)

    assert token.tolist() == [0]
