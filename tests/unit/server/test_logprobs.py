"""Log-probabilities in the shapes of OpenAI's API, whole and in chunks; and requests for what is not built."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.testclient import TestClient

from aotgaudi.engine.output import Event
from aotgaudi.engine.steps import TokenLogprobs
from aotgaudi.server.responses import LEAST_LOGPROB
from aotgaudi.spec.sampler import SamplerSetting, SamplerSpec
from tests.unit.llm.conftest import EOS
from tests.unit.server.conftest import FakeEngine, assert_refused, events_of, token

HI = [{"role": "user", "content": "hi"}]
H, E, L, BYTE_C3 = 39, 36, 43, 127
"""Ids of "H", "E", "L" and of a byte that is half a character, in the byte-level tokenizer's alphabet."""
EVERYTHING = SamplerSpec(
    settings=(
        SamplerSetting(temperature=1, top_p=0.9, top_k=0, min_p=0.1, presence_penalty=1, num_logprobs=5),
    )
)


def logged(request_id: str) -> Sequence[Event]:
    """Three tokens; the text of the second comes with the third."""
    first = TokenLogprobs(-0.25, ((H, -0.25), (E, -2.0)))
    second = TokenLogprobs(-3.0, ((L, -0.5), (BYTE_C3, -1.0)))
    third = TokenLogprobs(-math.inf, ((H, -1.5), (L, -1.75)))
    return (
        token(request_id, "H", H, logprobs=(first,)),
        token(request_id, "", E, logprobs=(second,)),
        token(request_id, "E", 257, logprobs=(third,), finish_reason="stop"),
    )


@pytest.fixture
def logging_engine(engine: FakeEngine) -> FakeEngine:
    engine.script, engine.sampler = logged, EVERYTHING
    return engine


def chunks(client: TestClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    return events_of(client.post(path, json={**body, "stream": True}).text)


EXPECTED = {
    "tokens": ["H", "E", EOS],
    "token_logprobs": [-0.25, -3.0, LEAST_LOGPROB],
    "top_logprobs": [
        {"H": -0.25, "E": -2.0},
        {"E": -3.0, "L": -0.5, "\ufffd": -1.0},
        {EOS: LEAST_LOGPROB, "H": -1.5, "L": -1.75},
    ],
    "text_offset": [0, 1, 2],
}


def test_a_completion_has_four_parallel_lists(client: TestClient, logging_engine: FakeEngine) -> None:
    answer = client.post("/v1/completions", json={"prompt": "a", "logprobs": 2})

    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["logprobs"] == EXPECTED
    assert logging_engine.added[0].params.logprobs == 2


def test_the_chunks_of_a_completion_add_up_to_the_whole(
    client: TestClient, logging_engine: FakeEngine
) -> None:
    pieces = chunks(client, "/v1/completions", {"prompt": "a", "logprobs": 2})

    logprobs = [piece["choices"][0]["logprobs"] for piece in pieces]
    assert {name: [x for part in logprobs for x in part[name]] for name in EXPECTED} == EXPECTED
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == "HE"


def shown(text: str, logprob: float) -> dict[str, object]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


CONTENT = [
    {**shown("H", -0.25), "top_logprobs": [shown("H", -0.25), shown("E", -2.0)]},
    {**shown("E", -3.0), "top_logprobs": [shown("L", -0.5), shown("\ufffd", -1.0)]},
    {**shown(EOS, LEAST_LOGPROB), "top_logprobs": [shown("H", -1.5), shown("L", -1.75)]},
]


def test_a_chat_has_one_object_a_token(client: TestClient, logging_engine: FakeEngine) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": HI, "logprobs": True, "top_logprobs": 2})

    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["logprobs"] == {"content": CONTENT, "refusal": None}


def test_the_chunks_of_a_chat_add_up_to_the_whole(client: TestClient, logging_engine: FakeEngine) -> None:
    opening, *pieces = chunks(client, "/v1/chat/completions", {"messages": HI, "logprobs": True})

    assert opening["choices"][0]["logprobs"] is None
    content = [token for piece in pieces for token in piece["choices"][0]["logprobs"]["content"]]
    assert content == CONTENT
    assert logging_engine.added[0].params.logprobs == 0


def test_who_does_not_ask_gets_null(client: TestClient) -> None:
    completion = client.post("/v1/completions", json={"prompt": "a"}).json()
    chat = client.post("/v1/chat/completions", json={"messages": HI, "logprobs": False}).json()

    assert completion["choices"][0]["logprobs"] is None
    assert chat["choices"][0]["logprobs"] is None


def test_every_sampling_parameter_reaches_the_engine(client: TestClient, logging_engine: FakeEngine) -> None:
    asked = {"min_p": 0.2, "presence_penalty": 1, "frequency_penalty": -0.5, "repetition_penalty": 1.25}

    answer = client.post("/v1/completions", json={"prompt": "a", **asked})

    assert answer.status_code == 200, answer.text
    params = logging_engine.added[0].params
    assert {name: getattr(params, name) for name in asked} == asked
    assert params.logprobs is None


@pytest.mark.parametrize(
    ("path", "body", "param", "fragment"),
    [
        ("/v1/completions", {"prompt": "a", "logprobs": 6}, "logprobs", "at most 5, not 6"),
        ("/v1/completions", {"prompt": "a", "logprobs": 21}, "logprobs", "0 to 20"),
        ("/v1/completions", {"prompt": "a", "logprobs": True}, "logprobs", "valid integer"),
        (
            "/v1/chat/completions",
            {"messages": HI, "logprobs": True, "top_logprobs": 6},
            "top_logprobs",
            "at most 5",
        ),
        ("/v1/chat/completions", {"messages": HI, "top_logprobs": 2}, "top_logprobs", "'logprobs' is true"),
        ("/v1/chat/completions", {"messages": HI, "logprobs": 1}, "logprobs", "valid boolean"),
        ("/v1/completions", {"prompt": "a", "min_p": 1.5}, "min_p", "from 0 to 1"),
        ("/v1/completions", {"prompt": "a", "presence_penalty": 3}, "presence_penalty", "from -2 to 2"),
        ("/v1/completions", {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "0.01 to 100"),
    ],
)
def test_what_is_out_of_range_is_refused(
    client: TestClient, logging_engine: FakeEngine, path: str, body: dict[str, Any], param: str, fragment: str
) -> None:
    assert_refused(client, path, body, param, fragment)
    assert not logging_engine.added


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"min_p": 0.1}, "min_p"),
    ],
)
def test_what_the_bundle_was_not_built_for_is_refused_before_it_queues(
    client: TestClient, engine: FakeEngine, body: dict[str, Any], param: str
) -> None:
    assert_refused(client, "/v1/chat/completions", {"messages": HI, **body}, param, "sampler.settings")
    assert not engine.added
