from __future__ import annotations

import itertools
import json
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bundle.launch import Room, WarmUpLevel, completion, token_prompt, warm_up

WARM_UP_LEVELS: tuple[WarmUpLevel, ...] = get_args(WarmUpLevel)
ROOMS = st.builds(
    Room, max_model_len=st.none() | st.integers(1, 1 << 20), max_num_seqs=st.none() | st.integers(1, 1 << 12)
)


def test_no_warm_up_asks_nothing() -> None:
    assert warm_up("none", Room()).requests == ()


def test_each_level_asks_what_the_one_before_it_asks() -> None:
    room = Room(max_model_len=512, max_num_seqs=4)
    more = [completion("one shape")]

    asked = [[request.name for request in warm_up(level, room, more).requests] for level in WARM_UP_LEVELS]

    for fewer, others in itertools.pairwise(asked):
        assert others[: len(fewer)] == fewer
        assert len(others) > len(fewer)
    assert asked[-1][-1] == "one shape"


@given(level=st.sampled_from(WARM_UP_LEVELS), room=ROOMS)
def test_names_are_unique_and_all_of_it_has_room(level: WarmUpLevel, room: Room) -> None:
    asked = warm_up(level, room)

    names = [request.name for request in asked.requests]
    assert len(set(names)) == len(names)
    assert all(request.copies <= (room.max_num_seqs or 8) for request in asked.requests)
    for request in asked.requests:
        prompt, max_tokens = request.body["prompt"], request.body["max_tokens"]
        assert isinstance(max_tokens, int)
        if isinstance(prompt, list) and (room.max_model_len or 512) > 32:
            assert len(prompt) + max_tokens <= (room.max_model_len or 512)


@given(level=st.sampled_from(WARM_UP_LEVELS), room=ROOMS)
def test_a_warm_up_names_no_model(level: WarmUpLevel, room: Room) -> None:
    assert all("model" not in request.body for request in warm_up(level, room).requests)


def test_what_is_compared_is_greedy() -> None:
    compared = [request for request in warm_up("sampler", Room()).requests if request.is_greedy]

    assert compared
    assert all(request.body["temperature"] == 0 for request in compared)


def test_the_kinds_that_are_known_to_compile_late_are_asked() -> None:
    bodies = [json.dumps(request.body) for request in warm_up("sampler", Room()).requests]

    for kind in ("logprobs", "prompt_logprobs", "top_k", "min_p", "repetition_penalty", "json_object"):
        assert any(f'"{kind}"' in body for body in bodies), kind


@pytest.mark.parametrize("num_tokens", [0, 1, 300])
def test_a_prompt_of_ids_has_the_length_that_was_asked_for(num_tokens: int) -> None:
    assert len(token_prompt(num_tokens)) == num_tokens
