"""How many requests of new connections begin in a turn of the event loop, and who is turned back."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.server.front.turnstile import Turnstile

MOST, MOST_TURNED_BACK = 16, 16 * 8


@dataclass
class Crowd:
    """What became of everybody, in the order in which it did."""

    begun: list[int] = field(default_factory=list)
    turned_back: list[int] = field(default_factory=list)
    is_full: bool = False


@dataclass
class Member:
    number: int
    crowd: Crowd
    can_be_turned_back: bool = True

    def begin(self) -> None:
        self.crowd.begun.append(self.number)

    def turn_back(self) -> bool:
        (self.crowd.turned_back if self.can_be_turned_back else self.crowd.begun).append(self.number)
        return self.can_be_turned_back


@given(st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=5))
def test_all_begin_or_are_turned_back_in_the_order_of_coming_and_few_in_any_turn(
    arrivals: list[tuple[int, bool]],
) -> None:
    """How many come in each turn, and whether the server is full in it."""
    crowd = Crowd()

    async def use() -> list[tuple[int, int]]:
        turnstile, number, sizes = Turnstile(asyncio.get_running_loop(), lambda: crowd.is_full), 0, []
        for num, crowd.is_full in (*arrivals, *[(0, False)] * 400):
            before = len(crowd.begun), len(crowd.turned_back)
            for _ in range(num):
                turnstile.come(Member(number, crowd))
                number += 1
            await asyncio.sleep(0)
            sizes.append((len(crowd.begun) - before[0], len(crowd.turned_back) - before[1]))
        return sizes

    sizes = asyncio.run(use())

    assert crowd.begun == sorted(crowd.begun)
    assert crowd.turned_back == sorted(crowd.turned_back)
    assert sorted(crowd.begun + crowd.turned_back) == list(range(sum(num for num, _ in arrivals)))
    assert max(num for num, _ in sizes) <= 2 * MOST  # What comes in a turn, and what waited for it.
    assert max(num for _, num in sizes) <= 2 * MOST_TURNED_BACK


def test_whoever_has_been_held_for_long_is_turned_back_though_there_is_room() -> None:
    crowd = Crowd()

    async def use() -> None:
        turnstile = Turnstile(asyncio.get_running_loop(), lambda: False)
        has_begun = [turnstile.come(Member(number, crowd)) for number in range(MOST + 3)]
        assert has_begun == [True] * MOST + [False] * 3
        time.sleep(0.3)  # A turn that others take.
        for _ in range(3):
            await asyncio.sleep(0)

    asyncio.run(use())

    assert crowd.begun == list(range(MOST))
    assert crowd.turned_back == [MOST, MOST + 1, MOST + 2]


def test_what_cannot_be_turned_back_counts_as_begun() -> None:
    crowd = Crowd(is_full=True)

    async def use() -> list[bool]:
        turnstile = Turnstile(asyncio.get_running_loop(), lambda: crowd.is_full)
        return [turnstile.come(Member(number, crowd, can_be_turned_back=False)) for number in range(MOST + 1)]

    assert asyncio.run(use()) == [True] * MOST + [False]


def test_a_turnstile_that_nobody_comes_to_does_nothing() -> None:
    crowd = Crowd()

    async def use() -> int:
        loop = asyncio.get_running_loop()
        turnstile = Turnstile(loop, lambda: False)
        assert turnstile.come(Member(0, crowd))
        for _ in range(5):
            await asyncio.sleep(0)
        return len(loop._ready)  # type: ignore[attr-defined]

    assert asyncio.run(use()) == 0
