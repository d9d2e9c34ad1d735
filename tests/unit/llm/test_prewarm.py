"""Prewarming hyper-connections, and counting the steps of each class."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from aotgaudi.bucketing.mhc_splits import StepSplits
from aotgaudi.entries import DecodeEntry, Entry, MhcEntry, PromptEntry
from aotgaudi.graphs.program import TensorSpec
from aotgaudi.llm.prewarm import SplitCounter, prewarm
from aotgaudi.llm.running import SplitCounts
from aotgaudi.runtime.executables import BoundProgram

CLASSES = ((64, 4), (128, 2), (160, 1))
MHC = tuple(MhcEntry(tokens, n, sublayer) for tokens, n in CLASSES for sublayer in ("attn", "ffn"))
SPLITS = StepSplits("sglang-pr25810", 4, 512, 4)


class Bound(BoundProgram):
    """A program of one input."""

    def __init__(self, spec: TensorSpec, run: Callable[[Any], Any]) -> None:
        self.inputs, self.run = (spec,), run


class Programs:
    """Programs that remember what they were run on."""

    def __init__(self, absent: tuple[Entry, ...] = ()) -> None:
        self.absent, self.ran = absent, list[tuple[Entry, tuple[int, ...], float]]()

    def get(self, entry: Entry) -> Any:
        if entry in self.absent:
            return None
        spec = TensorSpec(name="residual", shape=(1, entry.num_tokens, 4, 8), dtype="bfloat16")  # type: ignore[union-attr]

        def run(inputs: Any) -> None:
            self.ran.append((entry, tuple(inputs[0].shape), float(inputs[0].abs().sum())))

        return Bound(spec, run)


def test_every_program_runs_once_on_zeros_and_the_log_has_the_lines_of_the_server_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    programs = Programs()
    caplog.set_level(logging.INFO)

    warm = prewarm([PromptEntry(1, 160, 0), *MHC], programs.get)

    assert warm == {1, 2, 4}
    assert [(entry.num_tokens, entry.sublayer) for entry, _, _ in programs.ran] == [  # type: ignore[union-attr]
        (tokens, sublayer) for tokens in (160, 128, 64) for sublayer in ("attn", "ffn")
    ]
    assert all(shape[1] == entry.num_tokens and total == 0 for entry, shape, total in programs.ran)  # type: ignore[union-attr]
    assert caplog.messages[0] == "MHC prewarm max_num_tokens=160 representative token counts: (160, 128, 64)"
    assert len(caplog.messages) == 7
    assert caplog.messages[1].startswith("MHC prewarm path=attn num_tokens=160 completed in 0.")


def test_a_class_without_one_of_its_sublayers_is_not_warm() -> None:
    programs = Programs(absent=(MhcEntry(128, 2, "ffn"),))

    assert prewarm(MHC, programs.get) == {1, 4}


def test_a_model_without_hyper_connections_has_no_line_and_no_class(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    assert prewarm([PromptEntry(1, 160, 0)], Programs().get) == frozenset()
    assert caplog.messages == []
    assert SplitCounter(None, [PromptEntry(1, 160, 0)], frozenset()).counts({}) == ()


def test_steps_and_padded_tokens_are_counted_by_class() -> None:
    long, short, decode = PromptEntry(1, 160, 0), PromptEntry(2, 32, 0), DecodeEntry(4, 1, 8)
    counter = SplitCounter(SPLITS, [long, short, decode, *MHC], frozenset({1}))

    assert counter.counts({long: 2, short: 1, decode: 5}) == (
        SplitCounts(1, 2, 320, is_warm=True),
        SplitCounts(4, 6, 84, is_warm=False),
    )
    assert [counts.num_steps for counts in counter.counts({})] == [0, 0]
