"""Several answers to one prompt: their order, their seeds, and what they count as."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from starlette.testclient import TestClient

from aotgaudi.engine.output import Event, Usage
from tests.unit.server.conftest import events_of, token

HI = [{"role": "user", "content": "hi"}]


def own_name(request_id: str) -> Sequence[Event]:
    """Says which choice it is: ids end with ``-INDEX``."""
    number = request_id.rpartition("-")[2]
    usage = Usage(3, 1, num_cached_tokens=2)
    return (token(request_id, number, 1, finish_reason="stop", usage=usage),)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "abc"}), ("/v1/chat/completions", {"messages": HI})],
)
def test_n_answers_come_in_the_order_of_their_index(
    client: TestClient, engine: Any, path: str, body: dict[str, object]
) -> None:
    engine.script = own_name

    choices = client.post(path, json={**body, "n": 3, "best_of": 3}).json()["choices"]

    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert [choice.get("text") or choice["message"]["content"] for choice in choices] == ["0", "1", "2"]
    assert len({added.token_ids for added in engine.added}) == 1


def test_choices_of_the_first_prompt_come_first(client: TestClient, engine: Any) -> None:
    engine.script = own_name

    answer = client.post("/v1/completions", json={"prompt": [[1], [2, 3]], "n": 2}).json()

    assert [choice["text"] for choice in answer["choices"]] == ["0", "1", "2", "3"]
    assert [added.token_ids for added in engine.added] == [(1,), (1,), (2, 3), (2, 3)]


def test_a_prompt_counts_once_and_every_answer_counts(client: TestClient, engine: Any) -> None:
    engine.script = own_name

    usage = client.post("/v1/completions", json={"prompt": [[1, 2, 3], [4, 5, 6]], "n": 4}).json()["usage"]

    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (6, 8)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}


@pytest.mark.parametrize(
    ("seed", "seeds"),
    [(None, [None] * 3), (7, [7, 8, 9]), (2**63 - 2, [2**63 - 2, 2**63 - 1, -(2**63)])],
)
def test_the_seed_of_a_choice_follows_from_its_number(
    client: TestClient, engine: Any, seed: int | None, seeds: list[int | None]
) -> None:
    client.post("/v1/completions", json={"prompt": ["a", "b"], "n": 3, "seed": seed})

    assert [added.params.seed for added in engine.added] == seeds * 2


def test_every_chunk_of_a_stream_has_the_index_of_its_choice(client: TestClient, engine: Any) -> None:
    engine.script = own_name
    body = {"prompt": ["a", "b"], "n": 2, "stream": True, "stream_options": {"include_usage": True}}

    chunks = events_of(client.post("/v1/completions", json=body).text)

    pieces = [choice for chunk in chunks for choice in chunk["choices"]]
    assert sorted((piece["index"], piece["text"]) for piece in pieces) == [(i, str(i)) for i in range(4)]
    assert chunks[-1]["usage"]["completion_tokens"] == 4
