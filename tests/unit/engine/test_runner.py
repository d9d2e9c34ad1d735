"""The runner turns steps into the tensors of graphs/step_inputs.py, and samples the rows that ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from aotgaudi.engine.runner import ProgramRunner
from aotgaudi.engine.steps import DecodeRow, DecodeStep, DefragStep, PromptRow, PromptStep, SamplingRow
from aotgaudi.errors import NotWarmError
from aotgaudi.graphs.program import TensorSpec
from aotgaudi.graphs.step_inputs import decode_inputs, prompt_inputs
from aotgaudi.manifest.entries import DecodeEntry, DefragEntry, Entry, PromptEntry, SamplerEntry
from aotgaudi.runtime.executables import ExecutableTable

SIZE = 4
GREEDY = SamplingRow()


class Recorder:
    """A program that remembers what it was given."""

    def __init__(self, inputs: Sequence[TensorSpec], output: torch.Tensor) -> None:
        self.inputs, self._output = tuple(inputs), output
        self.seen: dict[str, torch.Tensor] = {}

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for spec, value in zip(self.inputs, inputs, strict=True):
            assert (tuple(value.shape), str(value.dtype)) == (spec.shape, f"torch.{spec.dtype}"), spec.name
        self.seen = {spec.name: value for spec, value in zip(self.inputs, inputs, strict=True)}
        return [self._output]


def runner_of(programs: dict[Entry, Recorder], **options: Any) -> ProgramRunner:
    table = ExecutableTable()
    for entry, program in programs.items():
        table.add(entry, program)  # type: ignore[arg-type]
        if isinstance(entry, SamplerEntry):
            table.declare_sampler(entry)
    return ProgramRunner(table, SIZE, **options)


def test_a_prompt_step_is_padded_to_its_entry() -> None:
    entry = PromptEntry(2, 4, 2)
    program = Recorder(prompt_inputs(entry, SIZE, (None, 3)), torch.zeros(2, 8))
    rows = (PromptRow((11, 12, 13), 4, (9, 5), None),)

    runner_of({entry: program}).run(PromptStep(entry, rows))

    seen = {name: value.tolist() for name, value in program.seen.items()}
    assert seen["input_ids"] == [11, 12, 13, 0, 0, 0, 0, 0]
    assert seen["positions"] == [4, 5, 6, 0, 0, 0, 0, 0]
    assert seen["slots"] == [20, 21, 22, 0, 0, 1, 2, 3]
    assert seen["ctx_blocks"] == [[9, 0], [0, 0]]
    assert seen["logits_indices"] == [2, 4]
    # 8 places of context, of which row 0 has 4 cached tokens and row 1 none; then the chunk itself.
    assert [sum(q) for q in seen["mask"][0][0]] == [5, 6, 7, 8]
    assert seen["mask"][0][0][1] == [True] * 4 + [False] * 4 + [True, True, False, False]
    assert [sum(q) for q in seen["mask"][1][0]] == [1, 2, 3, 4]
    assert seen["mask_w3"][0][0][0] == [False, False, True, True] + [False] * 4 + [True, False, False, False]


def test_a_decode_step_is_flat_over_its_blocks() -> None:
    entry = DecodeEntry(3, 1, 6)
    program = Recorder(decode_inputs(entry, SIZE, (None, 3)), torch.zeros(3, 8))
    rows = (DecodeRow(7, 5, (3, 8), GREEDY), DecodeRow(9, 0, (2, 6), GREEDY))
    sampler = SamplerEntry(3, 0.0, 1.0, 0, True)
    samplers = Recorder((TensorSpec(name="logits", shape=(3, 8), dtype="float32"),), torch.tensor([4, 5, 6]))

    tokens = runner_of({entry: program, sampler: samplers}).run(DecodeStep(entry, rows))

    seen = {name: value.tolist() for name, value in program.seen.items()}
    assert tokens == [4, 5]
    assert seen["input_ids"] == [7, 9, 0]
    assert seen["positions"] == [5, 0, 0]
    assert seen["slots"] == [33, 8, 0]
    assert seen["block_list"] == [3, 8, 2, 0, 0, 0]
    assert seen["block_rows"] == [0, 0, 1, 0, 0, 0]
    assert seen["row_blocks"] == [
        [True, True, False, False, False, False],
        [False, False, True, False, False, False],
        [False] * 6,
    ]
    assert [sum(block) for block in seen["mask"]] == [4, 2, 1, 0, 0, 0]
    assert seen["mask_w3"][:2] == [[False, False, False, True], [True, True, False, False]]


def test_a_sampler_of_another_size_serves_the_rows_that_sample() -> None:
    entry = PromptEntry(3, 4, 0)
    logits = torch.arange(24.0).view(3, 8)
    program = Recorder(prompt_inputs(entry, SIZE, (None,)), logits)
    sampler = SamplerEntry(1, 0.0, 1.0, 0, True)
    samplers = Recorder((TensorSpec(name="logits", shape=(1, 8), dtype="float32"),), torch.tensor([6]))
    rows = (
        PromptRow((1,), 0, (1,), None),
        PromptRow((2,), 0, (2,), GREEDY),
        PromptRow((3,), 0, (3,), None),
    )

    tokens = runner_of({entry: program, sampler: samplers}).run(PromptStep(entry, rows))

    assert tokens == [None, 6, None]
    assert torch.equal(samplers.seen["logits"], logits[1:2])


def test_no_row_samples_where_none_asks() -> None:
    entry = PromptEntry(1, 4, 0)
    program = Recorder(prompt_inputs(entry, SIZE, (None,)), torch.zeros(1, 8))

    assert runner_of({entry: program}).run(PromptStep(entry, (PromptRow((1,), 0, (1,), None),))) == [None]


def test_an_exchange_is_padded_with_the_padding_block() -> None:
    entry = DefragEntry(4)
    specs = tuple(TensorSpec(name=name, shape=(4,), dtype="int64") for name in ("sources", "destinations"))
    program = Recorder(specs, torch.zeros(4))

    runner_of({entry: program}).exchange(DefragStep(entry, ((9, 1), (8, 2))))

    assert program.seen["sources"].tolist() == [9, 8, 0, 0]
    assert program.seen["destinations"].tolist() == [1, 2, 0, 0]


def test_a_cold_entry_is_refused_unless_something_makes_it_warm() -> None:
    entry = PromptEntry(1, 4, 0)
    step = PromptStep(entry, (PromptRow((1,), 0, (1,), None),))

    with pytest.raises(NotWarmError, match=r"\(prompt, 1, 4, 0\) is not warm"):
        runner_of({}).run(step)

    asked: list[Entry] = []
    table = ExecutableTable()

    def warm(cold: Entry) -> None:
        asked.append(cold)
        table.add(entry, Recorder(prompt_inputs(entry, SIZE, (None,)), torch.zeros(1, 8)))  # type: ignore[arg-type]

    assert ProgramRunner(table, SIZE, warm).run(step) == [None]
    assert asked == [entry]


def test_the_thread_that_runs_sets_its_threads() -> None:
    before = torch.get_num_threads()
    entry = PromptEntry(1, 4, 0)
    program = Recorder(prompt_inputs(entry, SIZE, (None,)), torch.zeros(1, 8))
    runner = runner_of({entry: program}, num_threads=before + 1)

    runner.run(PromptStep(entry, (PromptRow((1,), 0, (1,), None),)))

    try:
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
