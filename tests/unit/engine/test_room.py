from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.engine.room import UNLIMITED, Room, RoomLimits
from aotgaudi.errors import RequestError

LIMITS = RoomLimits(max_requests=16, max_prompt_tokens=160)
MAX_MODEL_LEN = 40


def _refusal(room: Room, connection: Hashable, prompt_lens: list[int]) -> tuple[int, str]:
    before = room.num_refused
    with pytest.raises(RequestError) as refusal:
        room.enter(connection, prompt_lens)
    changed = [reason for reason, num in room.num_refused.items() if num != before[reason]]
    return refusal.value.http_status, "".join(changed)


def test_a_server_takes_as_many_requests_and_tokens_as_it_may() -> None:
    requests, tokens = Room(LIMITS, MAX_MODEL_LEN), Room(LIMITS, MAX_MODEL_LEN)
    for number in range(16):
        requests.enter(number, [1])
    for number in range(4):
        tokens.enter(number, [40])

    assert _refusal(requests, "late", [1]) == (429, "server_requests")
    assert _refusal(tokens, "late", [1]) == (429, "server_tokens")


def test_room_that_is_given_back_can_be_taken_again() -> None:
    room = Room(LIMITS, MAX_MODEL_LEN)
    room.enter("a", [30])
    room.enter("b", [1, 1])

    room.leave("a", 30)
    room.leave("b", 1)
    room.leave("b", 1)

    assert room.is_empty
    room.enter("a", [10, 10, 10, 10])


def test_the_more_is_taken_the_less_a_connection_gets() -> None:
    room = Room(LIMITS, MAX_MODEL_LEN)
    room.enter("a", [1] * 4)
    room.enter("b", [1] * 3)  # A quarter of the 12 that a leaves.

    assert _refusal(room, "c", [1] * 3) == (429, "connection_requests")  # A quarter of 9 is 2.
    room.enter("c", [1] * 2)
    assert _refusal(room, "c", [1]) == (429, "connection_requests")


def test_new_connections_leave_an_eighth_to_those_that_are_known() -> None:
    room = Room(LIMITS, MAX_MODEL_LEN)
    for number in range(14):
        room.enter(number, [1], is_new=True)

    with pytest.raises(RequestError) as refusal:
        room.enter("new", [1], is_new=True)
    assert refusal.value.http_status == 429
    room.enter("known", [1])


@given(st.integers(1, 40))
def test_a_server_with_nothing_open_takes_a_prompt_of_anybody(max_requests: int) -> None:
    room = Room(RoomLimits(max_requests=max_requests, max_prompt_tokens=40), MAX_MODEL_LEN)

    room.enter("new", [40], is_new=True)


def test_a_connection_has_a_share_of_the_tokens_too() -> None:
    room = Room(LIMITS, MAX_MODEL_LEN)
    for number in range(2):
        room.enter(number, [20])

    assert _refusal(room, "c", [15, 16]) == (429, "connection_tokens")  # A quarter of 120 is 30.
    room.enter("c", [15, 15])


def test_a_single_prompt_needs_no_share() -> None:
    room = Room(LIMITS, MAX_MODEL_LEN)
    for number in range(15):
        room.enter(number, [1])

    room.enter("last", [40])


def test_who_has_no_connection_needs_no_share() -> None:
    Room(LIMITS, MAX_MODEL_LEN).enter(None, [10] * 16)
    Room(UNLIMITED, MAX_MODEL_LEN).enter(None, [1_000_000] * 10_000)


@pytest.mark.parametrize("prompt_lens", [[1] * 5, [21, 20]])
def test_what_an_empty_server_would_refuse_is_a_mistake(prompt_lens: list[int]) -> None:
    assert _refusal(Room(LIMITS, MAX_MODEL_LEN), "a", prompt_lens) == (400, "")


def test_a_small_server_says_what_it_takes() -> None:
    room = Room(RoomLimits(max_requests=2), MAX_MODEL_LEN)

    with pytest.raises(RequestError, match="2 prompts are more than the 1 that this server takes at once"):
        room.enter("a", [1, 1])


def test_the_longest_prompt_has_room_on_an_empty_server() -> None:
    Room(RoomLimits(max_requests=1, max_prompt_tokens=1), MAX_MODEL_LEN).enter("a", [MAX_MODEL_LEN])


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(1, 40), min_size=1, max_size=6))))
def test_limits_hold_and_nothing_is_taken_by_who_is_refused(asked: list[tuple[int, list[int]]]) -> None:
    room, held = Room(LIMITS, MAX_MODEL_LEN), dict[int, list[int]]()
    for connection, prompt_lens in asked:
        before = (room._requests.num_taken, room._tokens.num_taken)
        try:
            room.enter(connection, prompt_lens)
        except RequestError:
            assert (room._requests.num_taken, room._tokens.num_taken) == before
            for prompt_len in held.pop(connection, []):
                room.leave(connection, prompt_len)
        else:
            held.setdefault(connection, []).extend(prompt_lens)
        lens = [length for mine in held.values() for length in mine]
        assert (room._requests.num_taken, room._tokens.num_taken) == (len(lens), sum(lens))
        assert len(lens) <= LIMITS.max_requests
        assert sum(lens) <= LIMITS.max_prompt_tokens
        assert all(len(mine) <= 4 for mine in held.values())


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8), st.booleans()), max_size=20), st.integers(0, 20)
)
def test_the_shortest_prompt_is_turned_away_just_where_it_would_be_refused(
    entered: list[tuple[int, int, bool]], num_before: int
) -> None:
    """Behind so many that are taken: known ones, of no length."""
    room = Room(LIMITS, MAX_MODEL_LEN)
    for connection, length, is_new in entered:
        with suppress(RequestError):
            room.enter(connection, [length], is_new=is_new)
    is_turned_away = room.turns_away(num_before)
    assert sum(room.num_refused.values()) >= is_turned_away

    for number in range(num_before):
        with suppress(RequestError):
            room.enter(("before", number), [0])
    try:
        room.enter("late", [1], is_new=True)
    except RequestError:
        assert is_turned_away
    else:
        assert not is_turned_away
