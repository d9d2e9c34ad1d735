"""The choice of entries in units, compiled, against the rule: the best first, of equal ones the oldest."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aotgaudi.backends.base import Executable, Unit
from aotgaudi.backends.inductor.compiler import InductorCompiler
from aotgaudi.backends.inductor.probe import probe
from aotgaudi.backends.inductor.runtime import InductorRuntime
from aotgaudi.digest import Key
from aotgaudi.graphs.canonical import to_text
from aotgaudi.graphs.choose_entries import CHOOSE_ENTRIES

ROWS, ENTRIES, K = 3, 11, 4
FEW = (0.0, -0.0, 1.0, -1.0, 2.0, math.inf, -math.inf, math.nan)


class Choose(torch.nn.Module):
    def forward(self, scores: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        chosen: torch.Tensor = CHOOSE_ENTRIES(scores, seen, K)
        return chosen


@pytest.fixture(scope="module")
def unit(tmp_path_factory: pytest.TempPathFactory) -> Executable:
    example = torch.zeros(ROWS, ENTRIES), torch.zeros(ROWS, ENTRIES, dtype=torch.bool)
    graph = torch.export.export(Choose(), example, strict=False).graph
    folder: Path = tmp_path_factory.mktemp("choose")
    target = probe("native")
    compiled = InductorCompiler(target).compile(
        Unit(to_text(graph), Key.of([("text", "x")]), "choose"), folder
    )
    return InductorRuntime(target).load(compiled.files)


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
    unit: Executable, scores: list[list[float]], seen: list[list[bool]]
) -> None:
    inputs = [torch.tensor(scores), torch.tensor(seen)]

    (compiled,) = unit.run(inputs)

    wanted = [rule(*row) for row in zip(scores, seen, strict=True)]
    assert compiled.tolist() == wanted
    assert CHOOSE_ENTRIES(*inputs, K).tolist() == wanted
