"""What the operator is defined to draw, against the rules written out in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aotgaudi.graphs.sample_tokens import SAMPLE_TOKENS
from tests import draws
from tests.draws import Row


def draw(logits: torch.Tensor, rows: list[Row]) -> list[int]:
    tokens: list[int] = SAMPLE_TOKENS(logits, *draws.tensors(rows)).tolist()
    return tokens


@settings(max_examples=150)
@given(
    rows=st.lists(draws.rows, min_size=1, max_size=4),
    kind=st.sampled_from(draws.KINDS),
    vocab=st.sampled_from([1, 5, 97, 300]),
    seed=st.integers(0, 2**31),
)
def test_the_noise_falls_on_the_token_that_is_drawn(
    rows: list[Row], kind: str, vocab: int, seed: int
) -> None:
    logits = torch.stack([draws.with_logits(vocab, torch.float32, seed + r, kind) for r in range(len(rows))])

    tokens = draw(logits, rows)

    for token, values, row in zip(tokens, logits, rows, strict=True):
        assert draws.may_be_drawn(token, values, row), (token, row)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nothing_is_drawn_where_the_largest_logit_is_not_finite(value: float) -> None:
    logits = torch.zeros(3, 9)
    logits[:2, 4] = value

    assert draw(logits, [Row(), Row(temperature=0), Row(noise=0.99)]) == [0, 4, 8]


def test_nothing_is_drawn_where_all_is_masked() -> None:
    assert draw(torch.full((1, 5), -torch.inf), [Row(noise=0.9)]) == [0]
