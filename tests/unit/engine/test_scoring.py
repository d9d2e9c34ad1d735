"""Hidden states of a prompt step become log-probabilities by heads of the sizes that are warm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.engine.sampler import Scorer
from aotgaudi.engine.steps import PromptRow, PromptStep, Scoring, StepResult
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.errors import NotWarmError
from aotgaudi.runtime.executables import ExecutableTable

VOCAB_SIZE = 11


class Head:
    """Its logits are its hidden states. Takes one size, as a compiled graph does."""

    def __init__(self, size: int) -> None:
        self.size, self.num_runs = size, 0

    def run_head(self, hidden: torch.Tensor) -> torch.Tensor:
        assert hidden.shape == (1, self.size, VOCAB_SIZE)
        self.num_runs += 1
        return hidden[0]


def scorer_of(*sizes: int) -> tuple[Scorer, dict[int, Head]]:
    table, heads = ExecutableTable(), {size: Head(size) for size in sizes}
    for size, head in heads.items():
        table.add(DecodeEntry(size, 1, size), head)  # type: ignore[arg-type]
    program_of: Any = table.get
    return Scorer(table, program_of), heads


def step_of(query_len: int, *scorings: Scoring | None) -> PromptStep:
    rows = tuple(PromptRow((0,) * query_len, 0, (1,), None, scoring) for scoring in scorings)
    return PromptStep(PromptEntry(len(rows) + 1, query_len, 0), rows)


def hidden_of(step: PromptStep) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    num_tokens = step.entry.batch_size * step.entry.query_len
    return torch.randn(1, num_tokens, VOCAB_SIZE, generator=generator)


scorings = st.none() | st.builds(
    Scoring,
    st.integers(0, 3),
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=5).map(tuple),
    st.integers(0, 4),
)


@given(st.lists(scorings, min_size=1, max_size=3), st.sets(st.integers(1, 6), min_size=1, max_size=3))
def test_every_target_gets_its_log_probability_whatever_sizes_are_warm(
    wanted: list[Scoring | None], sizes: set[int]
) -> None:
    step = step_of(8, *wanted)
    hidden, result = hidden_of(step), StepResult([None] * len(wanted))

    scorer_of(*sizes)[0].score(step, hidden, result)

    scores = torch.log_softmax(hidden[0], -1)
    assert result.prompt_logprobs.keys() == {row for row, scoring in enumerate(wanted) if scoring}
    for row, found in result.prompt_logprobs.items():
        scoring = wanted[row]
        assert scoring is not None
        assert len(found) == len(scoring.targets)
        for index, (values, target) in enumerate(zip(found, scoring.targets, strict=True)):
            expected = scores[row * 8 + scoring.first + index]
            top = expected.topk(scoring.num_top)
            assert values.logprob == pytest.approx(expected[target].item(), abs=1e-5)
            assert values.rank == 1 + int((expected > expected[target]).sum())
            assert [token_id for token_id, _ in values.top] == top.indices.tolist()
            assert [value for _, value in values.top] == pytest.approx(top.values.tolist(), abs=1e-5)
    assert not result.invalid_rows


def test_as_many_tokens_as_possible_share_a_run() -> None:
    scorer, heads = scorer_of(1, 2, 4)
    step = step_of(8, Scoring(0, (1,) * 5, 0), None, Scoring(2, (1,) * 5, 0))

    scorer.score(step, hidden_of(step), StepResult([None] * 3))

    assert {size: head.num_runs for size, head in heads.items()} == {1: 0, 2: 1, 4: 2}


def test_the_likeliest_token_has_the_same_number_as_the_likeliest_of_all() -> None:
    step = step_of(8, Scoring(0, (0,) * 8, 1))
    hidden = hidden_of(step)
    best = hidden[0, :8].argmax(-1).tolist()
    step, result = step_of(8, Scoring(0, tuple(best), 1)), StepResult([None])

    scorer_of(3)[0].score(step, hidden, result)

    assert all(values.logprob == values.top[0][1] for values in result.prompt_logprobs[0])


def test_a_row_of_nan_is_invalid_and_no_other() -> None:
    step = step_of(8, Scoring(0, (1, 2), 1), Scoring(0, (1, 2), 1))
    hidden, result = hidden_of(step), StepResult([None, None])
    hidden[0, 9] = torch.nan

    scorer_of(4)[0].score(step, hidden, result)

    assert result.invalid_rows == {1}


def test_without_a_warm_decode_entry_nothing_can_be_scored() -> None:
    with pytest.raises(NotWarmError, match="no decode entry is warm"):
        scorer_of()[0].score(
            step_of(8, Scoring(0, (1,), 0)), torch.zeros(1, 16, VOCAB_SIZE), StepResult([None])
        )
