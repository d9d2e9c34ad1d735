"""How much a turn of the event loop begins."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.server.front.pace import Pace


@given(st.lists(st.floats(0, 0.1), max_size=30))
def test_long_turns_halve_it_short_ones_give_it_back_one_by_one(turns: list[float]) -> None:
    now = [0.0]
    pace, expected = Pace(lambda: now[0], 2, 16), 16
    pace.start()

    for seconds in turns:
        began, now[0] = now[0], now[0] + seconds
        expected = max(2, expected // 2) if now[0] - began > 0.005 else min(16, expected + 1)
        assert pace.next() == expected


def test_a_pause_is_no_long_turn() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0], 1, 16)
    now[0] = 99.0
    pace.start()

    assert pace.next() == 16
