"""Compiled programs compute what transformers computes: prefill, chunked prefill, decode, any batch mix."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aotgaudi.bundle.programs import weights_bytes
from aotgaudi.engine.runner import ProgramRunner
from aotgaudi.engine.steps import DecodeRow, DecodeStep, DefragStep, PromptRow, PromptStep, SamplingRow
from aotgaudi.entries import DecodeEntry, DefragEntry, PromptEntry, SamplerEntry
from aotgaudi.manifest.memory import kv_cache_bytes
from aotgaudi.store.store import Store
from tests.integration.models import ARCHITECTURES, Built, build, reference, save_checkpoint, spec_of
from tests.parallel import nightly

FRESH = PromptEntry(1, 32, 0)
CHUNK = PromptEntry(2, 16, 4)
DECODE = DecodeEntry(4, 1, 16)
SWAP = DefragEntry(8)
TOLERANCE = 1e-4

COMPILED = ("llama", "gemma3_text", "mixtral", "deepseek_v3")
COMPILED_NIGHTLY = ("qwen2", "qwen3", "mistral")
"""The other architectures are compared before compiling (tests/unit/graphs)."""


class Conversation:
    """Four sequences over shuffled blocks, their logits by transformers, and steps over them."""

    def __init__(self, model: Any, runner: ProgramRunner, decode: DecodeEntry = DECODE) -> None:
        self._model, self._runner, self._decode_entry = model, runner, decode
        shuffle = random.Random(1)
        blocks = list(range(1, 41))
        shuffle.shuffle(blocks)
        lengths = (75, 40, 33, 66)
        self.tokens = [[shuffle.randrange(3, 320) for _ in range(n)] for n in lengths]
        self.tables = [tuple(blocks[8 * i : 8 * i + 8]) for i in range(4)]

    def prompt(self, entry: PromptEntry, *chunks: tuple[int, int, int]) -> float:
        """Prefills ``(sequence, start, length)`` chunks; returns the largest error of their last logits."""
        rows = tuple(
            PromptRow(tuple(self.tokens[i][start : start + n]), start, self.tables[i], None)
            for i, start, n in chunks
        )
        logits = self._runner.logits(PromptStep(entry, rows))
        ends = [(i, start + n) for i, start, n in chunks]
        return self._error(logits, ends)

    def decode(self, *rows: tuple[int, int]) -> float:
        """Decodes ``(sequence, position)`` rows; returns the largest error of their logits."""
        step = tuple(DecodeRow(self.tokens[i][p], p, self.tables[i], SamplingRow()) for i, p in rows)
        logits = self._runner.logits(DecodeStep(self._decode_entry, step))
        return self._error(logits, [(i, p + 1) for i, p in rows])

    def swap(self, first: int, second: int) -> None:
        """Exchanges two blocks, in the cache and in the tables."""
        self._runner.exchange(DefragStep(SWAP, ((first, second),)))
        renamed = {first: second, second: first}
        self.tables = [tuple(renamed.get(b, b) for b in table) for table in self.tables]

    def _error(self, logits: torch.Tensor, ends: list[tuple[int, int]]) -> float:
        with torch.no_grad():
            wanted = [self._model(torch.tensor([self.tokens[i][:end]])).logits[0, -1] for i, end in ends]
        return max((got - want).abs().max().item() for got, want in zip(logits, wanted, strict=False))


@pytest.fixture(scope="module")
def built(store: Store) -> Callable[[str], tuple[Any, Built]]:
    """Returns what builds an architecture (from the session's store) and its reference model."""

    def make(architecture: str) -> tuple[Any, Built]:
        model = reference(architecture)
        return model, build(spec_of(model), (FRESH, CHUNK, DECODE, SWAP), store)

    return make


@pytest.mark.parametrize("architecture", [*COMPILED, *nightly(*COMPILED_NIGHTLY)])
def test_logits_agree_with_transformers(
    architecture: str, built: Callable[[str], tuple[Any, Built]], tmp_path: Path
) -> None:
    model, artifacts = built(architecture)
    talk = Conversation(model, artifacts.runner(save_checkpoint(model, tmp_path)))

    prefill = [talk.prompt(FRESH, (i, 0, n)) for i, n in ((0, 32), (1, 32), (2, 17))]
    chunked = [
        talk.prompt(CHUNK, (0, 32, 16), (1, 32, 7)),
        talk.prompt(CHUNK, (2, 16, 16), (3, 0, 16)),
        talk.prompt(CHUNK, (3, 16, 16)),
        talk.prompt(CHUNK, (0, 48, 16), (3, 32, 16)),
    ]
    decode = [
        talk.decode((1, 39)),
        talk.decode((2, 32), (0, 64)),
        talk.decode((0, 65), (3, 48), (1, 39)),
        talk.decode((3, 49), (1, 39), (2, 32), (0, 66)),
    ]

    assert max(prefill) < TOLERANCE
    assert max(chunked) < TOLERANCE
    assert max(decode) < TOLERANCE


@pytest.mark.parametrize("architecture", [*COMPILED, *nightly(*COMPILED_NIGHTLY)])
def test_weights_and_caches_take_what_is_computed(
    architecture: str, built: Callable[[str], tuple[Any, Built]], tmp_path: Path
) -> None:
    model, artifacts = built(architecture)
    receipt, entries = artifacts.artifacts.receipt, artifacts.manifest.entries
    programs = [artifacts.artifacts.program(entry.id) for entry in entries]

    weights, caches = artifacts.allocated(save_checkpoint(model, tmp_path))

    assert weights_bytes(programs, receipt) == weights
    assert kv_cache_bytes(artifacts.manifest.spec) == caches


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3"])
def test_chunks_may_start_and_end_inside_a_block(
    architecture: str, built: Callable[[str], tuple[Any, Built]], tmp_path: Path
) -> None:
    model, artifacts = built(architecture)
    talk = Conversation(model, artifacts.runner(save_checkpoint(model, tmp_path)))

    errors = [
        talk.prompt(FRESH, (0, 0, 5)),
        talk.prompt(CHUNK, (0, 5, 3), (1, 0, 16)),
        talk.prompt(CHUNK, (0, 8, 16), (1, 16, 1)),
        talk.prompt(CHUNK, (1, 17, 16), (0, 24, 9)),
        talk.decode((0, 33), (1, 33)),
    ]

    assert max(errors) < TOLERANCE


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3"])
def test_a_swap_moves_a_sequence_and_nothing_else(
    architecture: str, built: Callable[[str], tuple[Any, Built]], tmp_path: Path
) -> None:
    model, artifacts = built(architecture)
    talk = Conversation(model, artifacts.runner(save_checkpoint(model, tmp_path)))
    talk.prompt(FRESH, (0, 0, 32))
    talk.prompt(FRESH, (2, 0, 32))

    talk.swap(talk.tables[0][1], talk.tables[2][0])

    assert talk.decode((0, 32), (2, 32)) < TOLERANCE


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3"])
def test_two_checkpoints_run_through_the_same_artifacts(
    architecture: str, built: Callable[[str], tuple[Any, Built]], tmp_path: Path
) -> None:
    first, artifacts = built(architecture)
    second = reference(architecture, seed=7)
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(not torch.equal(a, b) for a, b in pairs)

    for number, model in enumerate((first, second)):
        talk = Conversation(model, artifacts.runner(save_checkpoint(model, tmp_path / str(number))))

        assert talk.prompt(FRESH, (0, 0, 32)) < TOLERANCE
        assert talk.prompt(CHUNK, (0, 32, 16)) < TOLERANCE
        assert talk.decode((0, 48)) < TOLERANCE


POISON = 7


def test_a_token_that_is_nan_spoils_its_own_sequence_and_no_other(store: Store, tmp_path: Path) -> None:
    model = reference("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = float("nan")
    sampler = SamplerEntry(4, 0.0, 1.0, 0, True)
    built = build(spec_of(model), (CHUNK, DECODE, sampler), store)
    runner = built.runner(save_checkpoint(model, tmp_path))
    first, second, third = (list(range(start, start + 12)) for start in (20, 40, 60))

    def prompt(tokens: list[int], block: int) -> PromptRow:
        return PromptRow(tuple(tokens), 0, (block,), SamplingRow())

    def decode(tokens: list[int], block: int) -> DecodeRow:
        return DecodeRow(tokens[-1], len(tokens) - 1, (block,), SamplingRow())

    def next_token(tokens: list[int]) -> int:
        with torch.no_grad():
            return int(model(torch.tensor([tokens])).logits[0, -1].argmax())

    beside = runner.run(PromptStep(CHUNK, (prompt([30, POISON, 31], 1), prompt(first, 2))))
    assert (beside.token_ids[1], beside.invalid_rows) == (next_token(first), {0})
    reused = runner.run(PromptStep(CHUNK, (prompt(second, 1), prompt(third, 3))))
    assert (reused.token_ids, reused.invalid_rows) == ([next_token(second), next_token(third)], set())

    for tokens, token in ((first, beside.token_ids[1]), (second, reused.token_ids[0]), (third, POISON)):
        tokens.append(token or 0)
    joint = runner.run(DecodeStep(DECODE, (decode(third, 3), decode(first, 2), decode(second, 1))))
    assert joint.invalid_rows == {0}
    assert joint.token_ids[1:] == [next_token(first), next_token(second)]
    for tokens, token in ((first, joint.token_ids[1]), (second, joint.token_ids[2])):
        tokens.append(token or 0)
    later = runner.run(DecodeStep(DECODE, (decode(second, 1), decode(first, 2))))
    assert (later.token_ids, later.invalid_rows) == ([next_token(second), next_token(first)], set())


def test_equal_layers_are_one_unit(built: Callable[[str], tuple[Any, Built]]) -> None:
    _, artifacts = built("llama")

    program = artifacts.artifacts.program(DECODE.id)

    assert len(program.calls) == 1 + 3 + 1
    assert len({call.unit for call in program.calls[1:4]}) == 1


EXPERTS = {
    "mixtral": {"num_hidden_layers": 1},
    "gpt_oss": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
    "qwen3_moe": {"num_hidden_layers": 1},
    "deepseek_v3": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
}


@pytest.mark.parametrize("architecture", ["gpt_oss", *nightly("mixtral", "qwen3_moe", "deepseek_v3")])
def test_experts_in_bfloat16_are_built_and_answer(architecture: str, store: Store, tmp_path: Path) -> None:
    """Experts tie in bfloat16; of sixteen prompts a few may be answered by other experts than in float32."""
    model = reference(architecture, **EXPERTS[architecture])
    for parameter in model.parameters():  # What the server reads is what the reference has.
        parameter.data = parameter.data.bfloat16().float()
    prompt, decode = PromptEntry(1, 32, 0), DecodeEntry(1, 1, 2)
    artifacts = build(spec_of(model, dtype="bfloat16"), (prompt, decode), store)
    runner = artifacts.runner(save_checkpoint(model.bfloat16(), tmp_path))
    model.float()

    generator = random.Random(3)
    errors = []
    for _ in range(16):
        tokens = [generator.randrange(3, 320) for _ in range(21)]
        with torch.no_grad():
            wanted = model(torch.tensor([tokens])).logits[0]
        first = runner.logits(PromptStep(prompt, (PromptRow(tuple(tokens[:20]), 0, (1, 2), None),)))
        second = runner.logits(DecodeStep(decode, (DecodeRow(tokens[20], 20, (1, 2), SamplingRow()),)))
        errors.append(
            max(
                ((got[0].float() - want).abs().max() / want.abs().max()).item()
                for got, want in ((first, wanted[19]), (second, wanted[20]))
            )
        )

    assert sorted(errors)[len(errors) * 3 // 4] < 0.05


def test_every_architecture_listed_is_known() -> None:
    assert {*COMPILED, *COMPILED_NIGHTLY} <= set(ARCHITECTURES)
