"""Tokens of prompts, and text of tokens, in vLLM's forms; what load balancers ask."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from aotgaudi.server.app import create_app
from aotgaudi.server.preprocess.prepare import Preparer, Tokenized, answer_of_bytes, answer_to_bytes
from aotgaudi.server.service import Service
from tests.unit.llm.conftest import BOS
from tests.unit.server.conftest import MAX_MODEL_LEN, FakeEngine, assert_refused, make_preparer

HI = [{"role": "user", "content": "hi"}]
BOS_ID = 256


def tokenize(client: TestClient, **body: Any) -> dict[str, Any]:
    response = client.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_a_prompt_has_the_tokens_that_a_completion_would_have(client: TestClient, engine: FakeEngine) -> None:
    found = tokenize(client, model="tiny", prompt="HE", return_token_strs=True)
    client.post("/v1/completions", json={"prompt": "HE"})

    assert found == {
        "count": 3,
        "max_model_len": MAX_MODEL_LEN,
        "tokens": list(engine.added[0].token_ids),
        "token_strs": [BOS, "H", "E"],
    }


def test_special_tokens_are_left_out_on_request(client: TestClient) -> None:
    found = tokenize(client, prompt="HE", add_special_tokens=False)

    assert (found["count"], found["token_strs"]) == (2, None)
    assert BOS_ID not in found["tokens"]


@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": False}, {"continue_final_message": True}])
def test_a_chat_has_the_tokens_that_it_would_be_answered_for(
    client: TestClient, engine: FakeEngine, options: dict[str, bool]
) -> None:
    found = tokenize(client, messages=HI, **options)
    client.post("/v1/chat/completions", json={"messages": HI, **options})

    assert found["tokens"] == list(engine.added[0].token_ids)


def test_a_text_may_be_longer_than_the_model(client: TestClient) -> None:
    assert tokenize(client, prompt="x" * 1000)["count"] == 1001


@given(st.text())
def test_text_survives_the_way_there_and_back(text: str) -> None:
    preparer = make_preparer(max_len=8)

    ids = _over_the_wire(preparer, "tokenize", prompt=text, add_special_tokens=False).token_ids
    back = _over_the_wire(preparer, "detokenize", tokens=list(ids)).text

    assert back == text


def _over_the_wire(preparer: Preparer, kind: Any, **body: object) -> Tokenized:
    return answer_of_bytes(Tokenized, answer_to_bytes(preparer.prepare(kind, json.dumps(body).encode())))


def test_special_tokens_have_text(client: TestClient) -> None:
    assert client.post("/detokenize", json={"tokens": [BOS_ID, 39]}).json() == {"prompt": f"{BOS}H"}


@pytest.mark.parametrize(
    ("path", "body", "param", "problem"),
    [
        ("/tokenize", {}, "prompt", "Give either 'prompt' or 'messages'"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "prompt", "Give either 'prompt' or 'messages'"),
        ("/tokenize", {"prompt": ["a"]}, "prompt", "valid string"),
        ("/tokenize", {"messages": HI, "chat_template": "x"}, "chat_template", "`serve --chat-template`"),
        ("/detokenize", {}, "tokens", "Missing required parameter"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", "greater than or equal to 0"),
    ],
)
def test_what_cannot_be_tokenized_is_refused(
    client: TestClient, path: str, body: dict[str, object], param: str, problem: str
) -> None:
    assert_refused(client, path, body, param, problem)


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})])
def test_another_model_is_not_found(client: TestClient, path: str, body: dict[str, object]) -> None:
    assert client.post(path, json={"model": "gpt-9", **body}).status_code == 404


def test_a_ping_says_what_health_says(make_service: Callable[..., Service], engine: FakeEngine) -> None:
    client = TestClient(create_app(make_service()))

    assert client.get("/ping").status_code == client.post("/ping").status_code == 200
    engine.failure = RuntimeError("dead")
    assert client.get("/ping").status_code == client.post("/ping").status_code == 503


def test_the_load_is_the_number_of_open_answers(client: TestClient) -> None:
    assert client.get("/load").json() == {"server_load": 0}
