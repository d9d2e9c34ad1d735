from __future__ import annotations

from aotgaudi.engine.steps import (
    GREEDY_ROW,
    DecodeRow,
    DecodeStep,
    PromptRow,
    PromptStep,
    StepWork,
    work_of,
)
from aotgaudi.entries import DecodeEntry, PromptEntry


def test_the_work_of_a_prompt_step_is_its_new_tokens_and_their_contexts() -> None:
    rows = (PromptRow((1, 2, 3), 5, (1, 2), None), PromptRow((4,), 0, (3,), None))

    assert work_of(PromptStep(PromptEntry(4, 8, 3), rows), 4) == StepWork(4, 28, 2, 10)


def test_the_work_of_a_decode_step_is_a_token_a_row_and_all_blocks() -> None:
    rows = (DecodeRow(7, 5, (1, 2), GREEDY_ROW), DecodeRow(8, 0, (3,), GREEDY_ROW))

    assert work_of(DecodeStep(DecodeEntry(4, 1, 8), rows), 4) == StepWork(2, 2, 3, 5)
