"""Who is let in, and what is refused in which order."""

from __future__ import annotations

import pytest

from aotgaudi.engine.admission import Admission
from aotgaudi.engine.gate import Gate
from aotgaudi.engine.request import NewRequest
from aotgaudi.engine.room import RoomLimits
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.errors import RequestError
from aotgaudi.spec.limits import ServingLimits

LIMITS = ServingLimits(
    max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32, block_size=4, num_blocks=16
)


@pytest.fixture
def gate() -> Gate:
    """Room for two requests."""
    return Gate(Admission(LIMITS), RoomLimits(max_requests=2))


def asked(*names: str) -> list[NewRequest]:
    return [NewRequest(name, [1, 2, 3], SamplingParams()) for name in names]


def test_all_enter_or_none(gate: Gate) -> None:
    with pytest.raises(RequestError, match="3 prompts are more than the 2"):
        gate.enter(asked("a", "b", "c"), None, is_new=False)

    assert gate.is_empty
    gate.enter(asked("a", "b"), None, is_new=False)
    assert not gate.is_empty


def test_a_name_is_free_again_when_its_request_has_left(gate: Gate) -> None:
    gate.enter(asked("a"), "connection", is_new=False)
    with pytest.raises(RequestError, match="'a' is in use"):
        gate.check(asked("a"), "connection", is_new=False)

    gate.leave("a")

    assert gate.is_empty
    gate.enter(asked("a"), "connection", is_new=False)


def test_a_name_twice_in_one_call_is_refused(gate: Gate) -> None:
    with pytest.raises(RequestError, match="'a' is in use"):
        gate.enter(asked("a", "a"), None, is_new=False)

    assert gate.is_empty


def test_room_is_given_back_to_the_connection_that_had_it(gate: Gate) -> None:
    for turn in range(5):
        gate.enter(asked("a", "b"), None, is_new=False)
        with pytest.raises(RequestError, match="the server is full") as refused:
            gate.enter(asked(f"c{turn}"), "other", is_new=False)
        assert refused.value.http_status == 429
        gate.leave("a")
        gate.leave("b")
    assert gate.room.is_empty
    assert gate.room.num_refused["server_requests"] == 5


def test_a_closed_gate_gives_its_first_reason_and_lets_those_inside_leave(gate: Gate) -> None:
    gate.enter(asked("a"), None, is_new=False)
    gate.close("it rains")
    gate.close("it snows")

    for refuse in (gate.check, gate.enter):
        with pytest.raises(RequestError, match="it rains") as refused:
            refuse(asked("b"), None, is_new=False)
        assert refused.value.http_status == 503
    gate.leave("a")
    assert gate.is_empty
