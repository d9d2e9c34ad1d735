"""Who is next among connections that wait to be served."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from aotgaudi.server.front.arrivals import Arrivals

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    with ExitStack() as stack:
        made = [socket.socketpair() for _ in range(100)]
        for pair in made:
            for end in pair:
                stack.enter_context(end)
        yield made


def arrivals_of(pairs: list[Pair]) -> Arrivals:
    arrivals = Arrivals()
    for number, (ours, _) in enumerate(pairs):
        arrivals.add(ours, str(number))
    return arrivals


def order(arrivals: Arrivals) -> list[int]:
    return [int(arrivals.pop()[1]) for _ in range(len(arrivals))]


def test_few_are_served_as_they_have_come(pairs: list[Pair]) -> None:
    pairs[9][1].send(b"GET /health HTTP/1.1\r\n")
    arrivals = arrivals_of(pairs[:10])
    arrivals.look()

    assert order(arrivals) == list(range(10))


def test_in_a_crowd_mostly_the_latest_goes_first_and_the_oldest_now_and_then(pairs: list[Pair]) -> None:
    arrivals = arrivals_of(pairs)
    arrivals.look()

    found = order(arrivals)

    assert found[:8] == [99, 98, 97, 0, 96, 95, 94, 1]
    assert sorted(found) == list(range(100))


@pytest.mark.parametrize("request_line", [b"GET /health HTTP/1.1\r\n", b"HEAD / HTTP/1.1\r\n"])
def test_in_a_crowd_a_probe_goes_before_all_others(pairs: list[Pair], request_line: bytes) -> None:
    for number, (_, theirs) in enumerate(pairs):
        theirs.send(request_line if number == 50 else b"POST /v1/completions HTTP/1.1\r\n")
    arrivals = arrivals_of(pairs)
    arrivals.look()

    client, _ = arrivals.pop()

    assert client.recv(100) == request_line  # Nothing of it was taken.


def test_who_says_nothing_yet_is_looked_at_again(pairs: list[Pair]) -> None:
    arrivals = arrivals_of(pairs)
    for _ in range(3):
        arrivals.look()
    pairs[20][1].send(b"GET /health HTTP/1.1\r\n")

    for _ in range(2):  # Sixty-four of a hundred at a time.
        arrivals.look()

    assert arrivals.pop()[1] == "20"


def test_a_probe_whose_client_has_left_is_served_like_another(pairs: list[Pair]) -> None:
    arrivals = arrivals_of(pairs)
    for _, theirs in pairs:
        theirs.close()
    arrivals.look()

    assert sorted(order(arrivals)) == list(range(100))
    with pytest.raises(KeyError):
        arrivals.pop()
