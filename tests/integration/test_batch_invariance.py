"""In batch-invariant mode a row's logits are the same bits in any company; in the default mode nobody promises it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from aotgaudi.engine.runner import ProgramRunner
from aotgaudi.engine.steps import DecodeRow, DecodeStep, PromptRow, PromptStep, SamplingRow
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.store.store import Store
from tests.integration.models import BLOCK_SIZE, build, reference, save_checkpoint, spec_of

pytestmark = pytest.mark.timeout(1800)  # Each compiles dozens of units.

PROMPTS = (PromptEntry(1, 16, 0), PromptEntry(2, 32, 4), PromptEntry(3, 16, 5))
DECODES = (DecodeEntry(1, 1, 5), DecodeEntry(3, 1, 12), DecodeEntry(16, 1, 32))
SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
"""A third of SmolLM2-135M, with its three query heads to a KV head and two of its layers."""

LENGTHS = (9, 16, 21, 40, 63, 70)
LONGEST = 76
"""Tokens of each sequence that are known from the start, and at the end: five blocks."""


class Sequences:
    """Six sequences whose tokens are known beforehand; runs any of their steps, and returns logits."""

    def __init__(self, runner: ProgramRunner, seed: int) -> None:
        self._runner, self._random = runner, random.Random(seed)
        tokens = random.Random(5)
        self.tokens = [[tokens.randrange(3, 320) for _ in range(LONGEST)] for _ in LENGTHS]
        blocks = self._random.sample(range(1, 41), 40)
        self._tables = [tuple(blocks[5 * i : 5 * i + 5]) for i in range(len(LENGTHS))]

    def prompt(self, chunks: Sequence[tuple[int, int, int]], entry: PromptEntry | None = None) -> Tensor:
        """Runs chunks ``(sequence, start, end)`` in `entry`, or any that covers them."""
        fitting = [
            e
            for e in PROMPTS
            if len(chunks) <= e.batch_size
            and all(
                end - start <= e.query_len and start <= e.num_ctx_blocks * BLOCK_SIZE
                for _, start, end in chunks
            )
        ]
        rows = tuple(
            PromptRow(tuple(self.tokens[i][start:end]), start, self._tables[i], None)
            for i, start, end in chunks
        )
        return self._runner.logits(PromptStep(entry or self._random.choice(fitting), rows))

    def decode(self, rows: Sequence[tuple[int, int]], entry: DecodeEntry | None = None) -> Tensor:
        """Runs rows ``(sequence, position)`` in `entry`, or any that covers them."""
        num_blocks = sum(position // BLOCK_SIZE + 1 for _, position in rows)
        fitting = [e for e in DECODES if len(rows) <= e.batch_size and num_blocks <= e.num_blocks]
        step = tuple(DecodeRow(self.tokens[i][p], p, self._tables[i], SamplingRow()) for i, p in rows)
        return self._runner.logits(DecodeStep(entry or self._random.choice(fitting), step))

    def alone(self, i: int) -> dict[int, Tensor]:
        """Returns the logits after each token of sequence `i` from the last of its prompt on, by position."""
        found: dict[int, Tensor] = {}
        for start in range(0, LENGTHS[i], 32):
            end = min(start + 32, LENGTHS[i])
            found[end - 1] = self.prompt([(i, start, end)], PROMPTS[1])[0]
        for position in range(LENGTHS[i], LONGEST):
            found[position] = self.decode([(i, position)], DECODES[0])[0]
        return found

    def in_company(self) -> list[tuple[int, int, Tensor]]:
        """Runs all sequences together, chunked, grouped and ordered at random; some are computed again by prompts.

        Returns ``(sequence, position, logits)`` of every row.
        """
        found: list[tuple[int, int, Tensor]] = []
        known, computed = list(LENGTHS), [0] * len(LENGTHS)
        while min(known) < LONGEST:
            behind = [i for i in range(len(known)) if computed[i] < known[i]]
            ready = [i for i in range(len(known)) if i not in behind and known[i] < LONGEST]
            if behind and (not ready or self._random.random() < 0.5):
                picked = self._random.sample(behind, self._random.randint(1, min(3, len(behind))))
                longest = self._random.choice((16,) if len(picked) == 3 else (16, 32))
                chunks = [(i, computed[i], min(computed[i] + longest, known[i])) for i in picked]
                logits = self.prompt(chunks)
                for row, (i, _, end) in enumerate(chunks):
                    found.append((i, end - 1, logits[row]))
                    computed[i] = end
            else:
                picked = self._random.sample(ready, self._random.randint(1, len(ready)))
                logits = self.decode([(i, known[i]) for i in picked])
                for row, i in enumerate(picked):
                    found.append((i, known[i], logits[row]))
                    known[i], computed[i] = known[i] + 1, known[i] + 1
                    if self._random.random() < 0.05:
                        computed[i] = 0  # Preempted.
        return found


def runner_of(store: Store, path: Path, *, dtype: str, is_invariant: bool) -> ProgramRunner:
    model = reference("llama", **SHAPE)
    spec = spec_of(model, dtype=dtype, batch_invariant=is_invariant)
    artifacts = build(spec, (*PROMPTS, *DECODES), store)
    return artifacts.runner(save_checkpoint(model.to(getattr(torch, dtype)), path))


def num_differing(runner: ProgramRunner, num_seeds: int) -> tuple[int, int]:
    """Returns how many rows in company have other bits than alone, and how many rows there were."""
    alone = [Sequences(runner, seed=0).alone(i) for i in range(len(LENGTHS))]
    rows = [row for seed in range(1, 1 + num_seeds) for row in Sequences(runner, seed).in_company()]
    compared = [(logits, alone[i][position]) for i, position, logits in rows if position in alone[i]]
    return sum(not torch.equal(got, want) for got, want in compared), len(compared)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.nightly)])
def test_in_any_company_logits_are_the_same_bits(dtype: str, store: Store, tmp_path: Path) -> None:
    runner = runner_of(store, tmp_path, dtype=dtype, is_invariant=True)

    differing, compared = num_differing(runner, num_seeds=12)

    assert compared > 500
    assert differing == 0


def test_after_blocks_that_others_have_computed_logits_are_the_same_bits(
    store: Store, tmp_path: Path
) -> None:
    """What prefix caching does: blocks that another's prompt filled, and its decodes, in company, and the rest anew."""
    runner = runner_of(store, tmp_path, dtype="bfloat16", is_invariant=True)
    tokens = [random.Random(9).randrange(3, 320) for _ in range(70)]
    beside = DecodeRow(7, 3, (9,), SamplingRow())

    def prompt(entry: PromptEntry, start: int, end: int, *table: int) -> Tensor:
        row = PromptRow(tuple(tokens[start:end]), start, table, None)
        return runner.logits(PromptStep(entry, (row,)))[0]

    for start in (0, 32, 64):
        alone = prompt(PROMPTS[1], start, min(start + 32, 70), 1, 2, 3, 4, 5)
    for start in (0, 16):
        prompt(PROMPTS[2], start, min(start + 16, 21), 11, 12)
    for position in range(21, 48):
        row = DecodeRow(tokens[position], position, (11, 12, 13)[: position // BLOCK_SIZE + 1], SamplingRow())
        runner.logits(DecodeStep(DECODES[2], (beside, row)))
    after = prompt(PROMPTS[1], 48, 70, 11, 12, 13, 21, 22)

    assert torch.equal(after, alone)


def test_by_default_bits_depend_on_company(store: Store, tmp_path: Path) -> None:
    """What the documents say of the default mode: were it otherwise, they should say so."""
    runner = runner_of(store, tmp_path, dtype="bfloat16", is_invariant=False)

    differing, _ = num_differing(runner, num_seeds=2)

    assert differing > 0
