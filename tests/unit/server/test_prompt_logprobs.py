"""Echoes and log-probabilities of prompts, in the shapes of OpenAI's and vLLM's APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from starlette.testclient import TestClient

from aotgaudi.engine.output import Event, ScoredPrompt, Usage
from aotgaudi.engine.steps import TokenLogprobs
from aotgaudi.server.responses import AnswerHead, CompletionFormat, TokenTexts
from aotgaudi.spec.sampler import SamplerSetting, SamplerSpec
from tests.unit.server.conftest import FakeEngine, assert_refused, events_of, token

HI = [{"role": "user", "content": "hi"}]
H, E, L = 39, 36, 43
"""Ids of "H", "E" and "L" in the byte-level tokenizer's alphabet."""
SCORED = ScoredPrompt(
    (H, E, L), (TokenLogprobs(-0.5, ((E, -0.5),), 1), TokenLogprobs(-3.0, ((H, -0.25),), 4))
)
PROMPT_LOGPROBS = [
    None,
    {str(E): {"logprob": -0.5, "rank": 1, "decoded_token": "E"}},
    {
        str(L): {"logprob": -3.0, "rank": 4, "decoded_token": "L"},
        str(H): {"logprob": -0.25, "rank": 1, "decoded_token": "H"},
    },
]


@pytest.fixture(autouse=True)
def scoring_engine(engine: FakeEngine) -> FakeEngine:
    """Answers "H", then "E", with what was asked for."""

    def play(request_id: str) -> Sequence[Event]:
        params = next(added.params for added in engine.added if added.request_id == request_id)
        logged = () if params.logprobs is None else (TokenLogprobs(-1.0, ((H, -1.0),)),)
        scored = None if params.prompt_logprobs is None else SCORED
        return (
            token(request_id, "H", H, logprobs=logged, prompt=scored),
            token(request_id, "E", E, logprobs=logged, finish_reason="stop", usage=Usage(3, 2)),
        )

    setting = SamplerSetting(temperature=1, top_p=0.9, top_k=0, num_logprobs=5)
    engine.script, engine.sampler = play, SamplerSpec(settings=(setting,))
    return engine


def complete(client: TestClient, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json={"prompt": [H, E, L], **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def streamed(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    answer = client.post("/v1/completions", json={"prompt": [H, E, L], "stream": True, **body})
    return [event["choices"][0] for event in events_of(answer.text)]


@pytest.mark.parametrize(("prompt", "echo"), [([H, E, L], "HEL"), ("a b", "a b"), ("HEL", "HEL")])
def test_an_echo_is_the_prompt_before_the_answer(client: TestClient, prompt: object, echo: str) -> None:
    assert complete(client, prompt=prompt, echo=True)["choices"][0]["text"] == f"{echo}HE"


def test_each_choice_has_the_echo_of_its_prompt(client: TestClient) -> None:
    choices = complete(client, prompt=["a", "b"], n=2, echo=True)["choices"]

    assert [choice["text"] for choice in choices] == ["aHE", "aHE", "bHE", "bHE"]


def test_an_echo_has_the_log_probabilities_of_prompt_and_answer(client: TestClient) -> None:
    choice = complete(client, echo=True, logprobs=1)["choices"][0]

    assert choice["logprobs"] == {
        "tokens": ["H", "E", "L", "H", "E"],
        "token_logprobs": [None, -0.5, -3.0, -1.0, -1.0],
        "top_logprobs": [None, {"E": -0.5}, {"L": -3.0, "H": -0.25}, {"H": -1.0}, {"E": -1.0, "H": -1.0}],
        "text_offset": [0, 1, 2, 3, 4],
    }
    assert "prompt_logprobs" not in choice


def test_an_echo_alone_takes_a_token_that_is_not_returned(client: TestClient, engine: FakeEngine) -> None:
    answer = complete(client, echo=True, logprobs=1, max_tokens=0)

    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("HEL", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -3.0]
    assert answer["usage"]["completion_tokens"] == 0
    assert engine.added[0].params.max_tokens == 1


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_streamed_echo_is_that_of_the_whole_answer(client: TestClient, logprobs: int | None) -> None:
    whole = complete(client, echo=True, logprobs=logprobs)["choices"][0]

    pieces = streamed(client, echo=True, logprobs=logprobs)

    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    if logprobs is not None:
        for name, values in whole["logprobs"].items():
            assert [item for piece in pieces for item in piece["logprobs"][name]] == values


def test_log_probabilities_of_a_prompt_have_vllms_form(client: TestClient) -> None:
    choice = complete(client, prompt_logprobs=1)["choices"][0]
    chat = client.post("/v1/chat/completions", json={"messages": HI, "prompt_logprobs": 1}).json()

    assert choice["prompt_logprobs"] == chat["prompt_logprobs"] == PROMPT_LOGPROBS
    assert choice["logprobs"] is None


@pytest.mark.parametrize(
    ("body", "param", "problem"),
    [
        ({"max_tokens": 0}, "max_tokens", "or 0 with 'echo'"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "'stream' is false"),
        ({"prompt_logprobs": 6}, "prompt_logprobs", "at most 5, not 6: the largest num_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "from 0 to 20"),
        ({"echo": True, "logprobs": 6}, "logprobs", "at most 5"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    client: TestClient, body: dict[str, object], param: str, problem: str
) -> None:
    assert_refused(client, "/v1/completions", {"prompt": "a", **body}, param, problem)


def test_a_bundle_without_log_probabilities_says_which_setting_has_them(
    client: TestClient, engine: FakeEngine
) -> None:
    engine.sampler = SamplerSpec()

    response = client.post("/v1/completions", json={"prompt": "a", "prompt_logprobs": 1})

    assert (
        "no setting of sampler.settings in the spec of its bundle has num_logprobs above 0" in response.text
    )


def test_of_tokens_with_one_text_the_likeliest_counts() -> None:
    """Clients compare a token's value with the largest of all, to learn whether it was the likeliest."""
    texts = TokenTexts({1: "x", 2: "x", 3: "y"}.__getitem__)
    event = token("r", "x", 1, logprobs=(TokenLogprobs(-2.0, ((2, -0.5), (3, -1.0))),), finish_reason="stop")
    head = AnswerHead(id="i", created=0, model="m", system_fingerprint="f")

    (chunk,) = CompletionFormat(head, texts).chunks(0, event)
    choices: Any = chunk["choices"]

    assert choices[0]["logprobs"]["top_logprobs"] == [{"x": -0.5, "y": -1.0}]
