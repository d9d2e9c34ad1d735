"""How many requests of new connections begin in a turn of the event loop."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.server.front.turnstile import Turnstile

MOST = 16


@given(st.lists(st.integers(0, 60), max_size=5))
def test_everybody_begins_in_the_order_of_coming_and_few_in_any_turn(arrivals: list[int]) -> None:
    """A number is how many come in one turn."""
    begun: list[int] = []

    async def use() -> list[int]:
        turnstile, number, sizes = Turnstile(asyncio.get_running_loop()), 0, []
        for num in (*arrivals, *[0] * 30):
            before = len(begun)
            for _ in range(num):
                if turnstile.admits():
                    begun.append(number)
                else:
                    turnstile.hold(lambda number=number: begun.append(number))  # type: ignore[misc]
                number += 1
            await asyncio.sleep(0)
            sizes.append(len(begun) - before)
        return sizes

    sizes = asyncio.run(use())

    assert begun == list(range(sum(arrivals)))
    assert max(sizes) <= 2 * MOST  # What comes in a turn, and what waited for it.


def test_a_turnstile_that_nobody_comes_to_does_nothing() -> None:
    async def use() -> int:
        loop = asyncio.get_running_loop()
        turnstile = Turnstile(loop)
        assert turnstile.admits()
        for _ in range(5):
            await asyncio.sleep(0)
        return len(loop._ready)  # type: ignore[attr-defined]

    assert asyncio.run(use()) == 0
