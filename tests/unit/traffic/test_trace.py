from __future__ import annotations

from typing import Any

import pytest

from aotgaudi.errors import SpecError
from aotgaudi.traffic.trace import Trace

TRACE = Trace((0.0, 1.0, 1.0, 5.0, 6.0), (1, 2, 3, 4, 5), (10, 20, 30, 40, 0))


def test_halves_hold_all_requests_and_each_begins_at_zero() -> None:
    first, second = TRACE.halves()

    assert first == Trace((0.0, 1.0), (1, 2), (10, 20))
    assert second == Trace((0.0, 4.0, 5.0), (3, 4, 5), (30, 40, 0))


def test_one_request_has_no_halves() -> None:
    with pytest.raises(SpecError, match="at least two"):
        TRACE.part(0, 1).halves()


def test_seconds_are_those_between_the_first_and_the_last() -> None:
    assert TRACE.seconds == 6
    assert len(TRACE) == 5


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        (((), (), ()), "has no requests"),
        (((0.0,), (1, 2), (1,)), "different lengths"),
        (((float("nan"),), (1,), (1,)), "not finite"),
        (((1.0, 0.0), (1, 1), (1, 1)), "out of order"),
        (((0.0,), (0,), (1,)), "without tokens"),
        (((0.0,), (1,), (-1,)), "negative"),
    ],
)
def test_a_value_that_is_no_trace_cannot_be_made(columns: tuple[Any, Any, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        Trace(*columns)
