"""The choice of entries in units, compiled, against the rule: the best first, of equal ones the oldest."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aotgaudi.graphs.choose_entries import CHOOSE_ENTRIES
from tests.integration.units import Compiled

ROWS, ENTRIES, K = 3, 11, 4
FEW = (0.0, -0.0, 1.0, -1.0, 2.0, math.inf, -math.inf, math.nan)


@pytest.fixture(scope="module")
def unit(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    example = torch.zeros(ROWS, ENTRIES), torch.zeros(ROWS, ENTRIES, dtype=torch.bool)
    return Compiled(partial(CHOOSE_ENTRIES, k=K), example, tmp_path_factory.mktemp("choose"))


def rule(scores: list[float], seen: list[bool]) -> list[bool]:
    """NaN is larger than all numbers, and 0.0 and -0.0 are equal."""
    candidates = [number for number, is_seen in enumerate(seen) if is_seen]
    candidates.sort(
        key=lambda n: (not math.isnan(scores[n]), 0.0 if math.isnan(scores[n]) else -scores[n], n)
    )
    return [number in candidates[:K] for number in range(len(scores))]


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.lists(st.sampled_from(FEW), min_size=ENTRIES, max_size=ENTRIES), min_size=ROWS, max_size=ROWS
    ),
    st.lists(st.lists(st.booleans(), min_size=ENTRIES, max_size=ENTRIES), min_size=ROWS, max_size=ROWS),
)
def test_the_best_that_are_seen_are_chosen_and_of_equal_ones_the_oldest(
    unit: Compiled, scores: list[list[float]], seen: list[list[bool]]
) -> None:
    inputs = [torch.tensor(scores), torch.tensor(seen)]

    (compiled,) = unit.run(*inputs)

    wanted = [rule(*row) for row in zip(scores, seen, strict=True)]
    assert compiled.tolist() == wanted
    assert CHOOSE_ENTRIES(*inputs, K).tolist() == wanted
