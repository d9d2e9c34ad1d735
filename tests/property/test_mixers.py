"""Random conversations over what V3's and V4's layers keep, against transformers run one sequence at a time.

Sequences share beginnings, so blocks are found again; chunks start and end anywhere; sequences are preempted; blocks are
exchanged; rows of NaN run beside others. No logit may depend on any of it.
"""

from __future__ import annotations

import functools
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from aotgaudi.engine.runner import ProgramRunner
from aotgaudi.engine.steps import DecodeRow, DecodeStep, DefragStep, PromptRow, PromptStep, SamplingRow
from aotgaudi.entries import DecodeEntry, DefragEntry, PromptEntry, SamplerEntry
from tests.integration.models import BLOCK_SIZE, reference
from tests.unit.graphs.test_trace import CLOSE, eager_runner

CHUNK, DECODE, SWAP = PromptEntry(2, 16, 4), DecodeEntry(4, 1, 16), DefragEntry(8)
SAMPLERS = tuple(SamplerEntry(size, 0.0, 1.0, 0, True) for size in (1, 2, 4))
POISON, NUM_BLOCKS = 7, 40


def texts() -> tuple[tuple[int, ...], ...]:
    """Three sequences of 70 tokens; two begin with the same 41."""
    random = Random(2)
    first, second, third = (random.choices([t for t in range(3, 320) if t != POISON], k=70) for _ in range(3))
    return tuple(map(tuple, (first, first[:41] + second[41:], third)))


TEXTS = texts()


@functools.lru_cache(maxsize=2)
def prepared(architecture: str) -> tuple[ProgramRunner, list[torch.Tensor]]:
    """A runner of traced programs, and the logits of the texts by transformers."""
    model = reference(architecture)
    with torch.no_grad():
        logits = [model(torch.tensor([text])).logits[0] for text in TEXTS]
        model.get_input_embeddings().weight[POISON] = float("nan")
    entries = CHUNK, DECODE, SWAP, *SAMPLERS
    return eager_runner(model, entries), logits


class Conversation(RuleBasedStateMachine):
    """Block tables of up to three sequences, one for each text. `kept` has full blocks by the tokens up to their end."""

    architecture = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner, self.logits = prepared(self.architecture)
        self.free = list(range(NUM_BLOCKS, 0, -1))
        self.tables: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.kept: dict[tuple[int, ...], int] = {}

    def live(self, least: int, most: int) -> list[int]:
        """The sequences of which at least so many tokens, and fewer than `most`, are computed."""
        return [i for i, num in sorted(self.computed.items()) if least <= num < most]

    def grow(self, i: int, num: int) -> tuple[int, ...]:
        """Gives a sequence the blocks of its next tokens, and returns its table."""
        while len(self.tables[i]) * BLOCK_SIZE < self.computed[i] + num:
            self.tables[i].append(self.free.pop())
        return tuple(self.tables[i])

    def advance(self, i: int, num: int, logits: torch.Tensor | None) -> None:
        self.computed[i] += num
        for number in range(self.computed[i] // BLOCK_SIZE):
            self.kept.setdefault(TEXTS[i][: (number + 1) * BLOCK_SIZE], self.tables[i][number])
        if logits is not None:
            error = (logits - self.logits[i][self.computed[i] - 1]).abs().max().item()
            assert error < CLOSE, (i, self.computed[i])

    @precondition(lambda self: len(self.computed) < len(TEXTS))
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """A sequence comes. Full blocks that have its beginning are shared."""
        i = data.draw(st.sampled_from([i for i in range(len(TEXTS)) if i not in self.computed]))
        hit: list[int] = []
        while (key := TEXTS[i][: (len(hit) + 1) * BLOCK_SIZE]) in self.kept and len(key) < len(TEXTS[i]) - 5:
            hit.append(self.kept[key])
        self.tables[i], self.computed[i] = hit, len(hit) * BLOCK_SIZE

    @precondition(lambda self: self.live(0, 65))
    @rule(data=st.data(), beside_nan=st.booleans())
    def chunk(self, data: st.DataObject, beside_nan: bool) -> None:
        """One or two chunks, or one beside a row of NaN."""
        some = st.lists(
            st.sampled_from(self.live(0, 65)), min_size=1, max_size=1 if beside_nan else 2, unique=True
        )
        chosen = [(i, data.draw(st.integers(1, min(16, 70 - self.computed[i])))) for i in data.draw(some)]
        rows = [
            PromptRow(
                TEXTS[i][self.computed[i] : self.computed[i] + num],
                self.computed[i],
                self.grow(i, num),
                SamplingRow(),
            )
            for i, num in chosen
        ]
        if not beside_nan:
            logits = list(self.runner.logits(PromptStep(CHUNK, tuple(rows))))
        else:
            row = PromptRow((30, POISON, 31), 0, (self.free[0],), SamplingRow())
            result = self.runner.run(PromptStep(CHUNK, (row, *rows)))
            assert result.invalid_rows == {0}
            self.runner.clear([self.free[0]])
            logits = []
        for n, (i, num) in enumerate(chosen):
            self.advance(i, num, logits[n] if logits else None)

    @precondition(lambda self: self.live(1, 70))
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        """One token of some sequences, in any order."""
        chosen = data.draw(st.permutations(self.live(1, 70)))
        chosen = chosen[: data.draw(st.integers(1, len(chosen)))]
        rows = (
            DecodeRow(
                TEXTS[i][self.computed[i]],
                self.computed[i],
                self.grow(i, 1),
                SamplingRow(),
            )
            for i in chosen
        )
        logits = self.runner.logits(DecodeStep(DECODE, tuple(rows)))
        for n, i in enumerate(chosen):
            self.advance(i, 1, logits[n])

    @precondition(lambda self: self.computed)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """A sequence loses its blocks. Full ones are kept, as long as they are not needed."""
        i = data.draw(st.sampled_from(sorted(self.computed)))
        kept = set(self.kept.values()).union(*(t for j, t in self.tables.items() if j != i))
        self.free += [block for block in self.tables.pop(i) if block not in kept]
        del self.computed[i]
        if data.draw(st.booleans()):
            in_use = {block for table in self.tables.values() for block in table}
            self.free += {block for block in self.kept.values() if block not in in_use}
            self.kept = {key: block for key, block in self.kept.items() if block in in_use}

    @rule(pair=st.lists(st.integers(1, NUM_BLOCKS), min_size=2, max_size=2, unique=True))
    def exchange(self, pair: list[int]) -> None:
        """Two blocks change places, in the caches and in all that names them."""
        first, second = pair
        self.runner.exchange(DefragStep(SWAP, ((first, second),)))
        renamed = {first: second, second: first}
        self.free = [renamed.get(block, block) for block in self.free]
        for table in self.tables.values():
            table[:] = [renamed.get(block, block) for block in table]
        self.kept = {key: renamed.get(block, block) for key, block in self.kept.items()}

    @invariant()
    def no_block_is_lost(self) -> None:
        used = {block for table in self.tables.values() for block in table} | set(self.kept.values())
        assert not used & set(self.free)
        assert len(used) + len(self.free) == NUM_BLOCKS


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["deepseek_v3", "deepseek_v4"])
def test_no_logit_depends_on_chunks_preemption_shared_blocks_exchanges_or_nan_rows(
    architecture: str,
) -> None:
    kind: Any = type("Of" + architecture, (Conversation,), {"architecture": architecture})
    run_state_machine_as_test(
        kind,
        settings=settings(
            max_examples=4, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
