"""A step costs the same whatever the size of the KV cache: units write to it in place, and copy none of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from aotgaudi.engine.runner import ProgramRunner
from aotgaudi.engine.steps import DecodeRow, DecodeStep, DefragStep, PromptRow, PromptStep, SamplingRow
from aotgaudi.entries import DecodeEntry, DefragEntry, Entry, PromptEntry
from aotgaudi.store.store import Store
from tests.integration.models import build, reference, save_checkpoint, spec_of

PROMPT, DECODE, SWAP = PromptEntry(1, 16, 1), DecodeEntry(1, 1, 2), DefragEntry(8)
SMALL, LARGE = 40, 20_000
"""Blocks. The large cache is 41 MB a layer: copying it takes milliseconds, and a step of this model does not."""


def run_prompt(runner: ProgramRunner) -> None:
    runner.logits(PromptStep(PROMPT, (PromptRow(tuple(range(3, 19)), 16, (1, 2), None),)))


def run_decode(runner: ProgramRunner) -> None:
    runner.logits(DecodeStep(DECODE, (DecodeRow(5, 20, (1, 2), SamplingRow()),)))


def run_swap(runner: ProgramRunner) -> None:
    runner.exchange(DefragStep(SWAP, ((1, 5), (2, 6))))


@pytest.mark.alone
@pytest.mark.parametrize(
    ("architecture", "entry", "run"),
    [
        *(
            pytest.param(architecture, entry, run, marks=marks)
            for architecture, marks in (("llama", ()), ("deepseek_v3", pytest.mark.nightly))
            for entry, run in ((PROMPT, run_prompt), (DECODE, run_decode), (SWAP, run_swap))
        ),
        ("deepseek_v4", DECODE, run_decode),  # Several caches a layer, each written to and read.
    ],
)
def test_a_large_cache_makes_no_step_slower(
    architecture: str, entry: Entry, run: Callable[[ProgramRunner], None], store: Store, tmp_path: Path
) -> None:
    model = reference(architecture)
    model_dir = save_checkpoint(model, tmp_path)

    seconds = {}
    for num_blocks in (SMALL, LARGE):
        runner = build(spec_of(model, num_blocks), (entry,), store).runner(model_dir)
        seconds[num_blocks] = median_seconds(lambda runner=runner: run(runner))

    assert seconds[LARGE] < 3 * seconds[SMALL] + 0.001


def median_seconds(call: Callable[[], None]) -> float:
    for _ in range(3):
        call()
    samples = []
    for _ in range(15):
        started = time.perf_counter()
        call()
        samples.append(time.perf_counter() - started)
    return statistics.median(samples)
