"""The choice of tokens as units have it, compiled, against the rules written out in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aotgaudi.graphs.sample_tokens import SAMPLE_TOKENS
from tests import draws
from tests.draws import Row
from tests.integration.units import Compiled

ROWS = 4


def draw(logits: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """One call of the operator; plain: without filters."""
    tokens: torch.Tensor = SAMPLE_TOKENS(logits, *others, *[None] * (5 - len(others)))
    return tokens


class Case:
    """A unit of one call."""

    def __init__(self, vocab: int, dtype: torch.dtype, level: str, *, filters: bool = True) -> None:
        self.vocab, self.dtype, self.level, self.filters = vocab, dtype, level, filters

    def inputs(self, logits: torch.Tensor, rows: list[Row]) -> list[torch.Tensor]:
        return [logits, *draws.tensors(rows)[: 5 if self.filters else 2]]

    def compiled(self, folder: Path) -> Compiled:
        example = self.inputs(torch.zeros(ROWS, self.vocab, dtype=self.dtype), [Row()] * ROWS)
        return Compiled(draw, example, folder, self.level)


CASES = {
    "a vocabulary as models have": Case(49152, torch.bfloat16, "avx512"),
    "one that no vector divides": Case(1003, torch.float32, "avx512"),
    "with vectors of half the length": Case(5003, torch.float32, "avx2"),
    "smaller than a vector": Case(7, torch.float16, "avx2"),
    "without filters": Case(2999, torch.bfloat16, "avx2", filters=False),
}


@pytest.fixture(scope="module", params=CASES)
def case_and_unit(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Case, Compiled]:
    case = CASES[request.param]
    if case.level == "avx512" and "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this machine has no AVX-512")
    return case, case.compiled(tmp_path_factory.mktemp("draw"))


def run(case: Case, unit: Compiled, logits: torch.Tensor, rows: list[Row]) -> list[int]:
    tokens: list[int] = unit.run(*case.inputs(logits, rows))[0].tolist()
    return tokens


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_units_draw_as_defined_and_each_row_by_itself(
    case_and_unit: tuple[Case, Compiled], data: st.DataObject
) -> None:
    case, unit = case_and_unit
    row = draws.rows if case.filters else draws.plain
    rows = data.draw(st.lists(row, min_size=ROWS, max_size=ROWS))
    kinds = data.draw(st.lists(st.sampled_from(draws.KINDS), min_size=ROWS, max_size=ROWS))
    seed = data.draw(st.integers(0, 2**31))
    logits = torch.stack(
        [draws.with_logits(case.vocab, case.dtype, seed + r, kind) for r, kind in enumerate(kinds)]
    )

    tokens = run(case, unit, logits, rows)

    for token, values, one in zip(tokens, logits, rows, strict=True):
        assert draws.may_be_drawn(token, values, one), (token, one)
    for r in range(ROWS):  # In other company, and at another place.
        others = [logits[r], *torch.zeros(ROWS - 1, case.vocab, dtype=case.dtype)]
        assert run(case, unit, torch.stack(others), [rows[r], *[Row()] * (ROWS - 1)])[0] == tokens[r]


def test_what_is_no_number_draws_nothing(case_and_unit: tuple[Case, Compiled]) -> None:
    case, unit = case_and_unit
    logits = torch.zeros(ROWS, case.vocab, dtype=case.dtype)
    logits[0, 5] = logits[1, 5] = torch.nan
    logits[2, 5] = torch.inf
    logits[3] = -torch.inf
    rows = [Row(noise=0.9), Row(temperature=0), Row(noise=0.9), Row(noise=0.9)]

    assert run(case, unit, logits, rows) == [0, 5, 0, 0]
