"""Facts that vLLM's and SGLang's own tests of their OpenAI servers state, asked of ours.

docs/openai-cases.md has a row for each case, ours and theirs, and says which test holds it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from aotgaudi.engine.output import TokenEvent
from aotgaudi.engine.steps import TokenLogprobs
from aotgaudi.server.app import create_app
from aotgaudi.server.options import ReplyParsers
from aotgaudi.server.service import Service
from tests.unit.server.conftest import assert_refused, events_of, token

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BASIC = {
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": [{"role": "user", "content": "a"}]},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for each in messages %}{{ each.content }}{% endfor %}"
)
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}


@pytest.fixture
def client(make_service: Callable[..., Service], engine: Any) -> TestClient:
    """Of a server that calls tools and has room."""
    engine._check = lambda *_: None
    parsers = ReplyParsers(enable_auto_tool_choice=True, tool_call_parser="hermes")
    return TestClient(create_app(make_service(TEMPLATE, 4096, parsers=parsers)))


REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    # What a prompt may be.
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [[-1]]}, "prompt[0][0]"),
    (COMPLETIONS, {"max_tokens": -1}, "max_tokens"),
    (CHAT, {"cache_salt": ""}, "cache_salt"),
    # Streams.
    (COMPLETIONS, {"stream": False, "stream_options": {"include_usage": None}}, "stream_options"),
    (COMPLETIONS, {"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    (COMPLETIONS, {"stream": False, "stream_options": {"continuous_usage_stats": None}}, "stream_options"),
    (CHAT, {"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    # Numbers out of range.
    (COMPLETIONS, {"logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"logprobs": 30, "stream": True}, "logprobs"),
    (COMPLETIONS, {"prompt_logprobs": -1}, "prompt_logprobs"),
    (CHAT, {"prompt_logprobs": -1}, "prompt_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21, "stream": True}, "top_logprobs"),
    (CHAT, {"seed": 2**63}, "seed"),
    (CHAT, {"seed": -(2**63) - 1}, "seed"),
    # Tokens.
    (CHAT, {"logit_bias": {"not_a_token_id": 50}}, "logit_bias.not_a_token_id"),
    (CHAT, {"logit_bias": {"1": "not_a_number"}}, "logit_bias.1"),
    (CHAT, {"logit_bias": {"bad1": 50.0, "bad2": 20.0}}, "logit_bias.bad1"),
    (CHAT, {"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    # What the answer must be.
    (COMPLETIONS, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHAT, {"response_format": {"type": "structural_tag"}}, "response_format"),
    (COMPLETIONS, {"structured_outputs": {"json": {"properties": {"a": "b"}}}}, "structured_outputs"),
    (COMPLETIONS, {"structured_outputs": {"regex": "[.*"}, "stop": ["\n"]}, "structured_outputs"),
    (COMPLETIONS, {"structured_outputs": {"grammar": "root ::= nothing\n"}}, "structured_outputs"),
    (CHAT, {"structured_outputs": {"regex": {"1": "Python", "2": "C++"}}}, "structured_outputs.regex"),
    # Tools.
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    (
        CHAT,
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
    ),
    (CHAT, {"tools": [TOOL], "tool_choice": {}}, "tool_choice.function"),
    (CHAT, {"tools": [TOOL], "tool_choice": "bogus"}, "tool_choice"),
    (CHAT, {"tools": [TOOL], "tool_choice": 123}, "tool_choice"),
    # Ours differ here: each has a row that says why.
    (CHAT, {"messages": [{"role": "my-custom-role", "content": "a"}]}, "messages[0].role"),
    (COMPLETIONS, {"use_beam_search": True, "n": 2}, "use_beam_search"),
    (COMPLETIONS, {"prompt_embeds": ["a"]}, "prompt_embeds"),
    (COMPLETIONS, {"return_token_ids": True}, "return_token_ids"),
    (COMPLETIONS, {"truncate_prompt_tokens": 4, "truncation_side": "right"}, "truncation_side"),
    (CHAT, {"logprob_token_ids": [1]}, "logprob_token_ids"),
)


@pytest.mark.parametrize(("path", "asked", "param"), REFUSED)
def test_what_they_refuse_is_refused_by_name(
    client: TestClient, path: str, asked: dict[str, Any], param: str
) -> None:
    assert_refused(client, path, {**BASIC[path], **asked}, param)


@pytest.mark.parametrize("raw", ['"this is not valid json{{{"', '["not", "an", "object"]', "42", "null", "{"])
@pytest.mark.parametrize("path", BASIC)
def test_a_body_that_is_no_object_is_the_clients_mistake(client: TestClient, path: str, raw: str) -> None:
    assert_refused(client, path, raw.encode(), None)


TAKEN: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, {"prompt": ["a"]}),
    (COMPLETIONS, {"truncate_prompt_tokens": 4, "truncation_side": "left"}),
    (COMPLETIONS, {"stream": True, "stream_options": {}}),
    (CHAT, {"messages": [{"role": "system", "content": [{"type": "text", "text": "a"}]}]}),
    (CHAT, {"response_format": {"type": "text"}}),
    (CHAT, {"seed": -(2**63)}),
    (CHAT, {"tools": [TOOL], "tool_choice": None}),
    (CHAT, {"tools": [TOOL], "tool_choice": "none"}),
    (CHAT, {"tool_choice": None, "structured_outputs": {"json": {"type": "object"}}}),
    (CHAT, {"chat_template_kwargs": {"custom_param": "value"}}),
    (CHAT, {"logprobs": False, "top_logprobs": None}),
    (CHAT, {"messages": [{"role": "user", "content": "a", "extra_field": "0"}]}),
    (CHAT, {"messages": [{"role": "assistant"}, {"role": "user", "content": "a"}]}),
    (CHAT, {"stream": True, "stream_options": {"min_characters": 10}}),
    (CHAT, {"tools": [{**TOOL, "extra": 1, "function": {**TOOL["function"], "extra": 1}}]}),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "extra": 1}, "extra": 1}},
    ),
    (CHAT, {"max_completion_tokens": 3, "max_tokens": 4}),
    (CHAT, {"reasoning_effort": "low"}),
    (CHAT, {"max_tokens": 16.0, "seed": 1.0, "stop_token_ids": [7.0], "n": 1.0, "temperature": 1}),
    (COMPLETIONS, {"prompt": [[97.0, 98.0], [99]], "max_tokens": 16.0}),
    (
        CHAT,
        {
            "messages": [
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "x", "name": "f"},
            ]
        },
    ),
    # Ours differ here: it asks for nothing.
    (CHAT, {"tool_choice": "auto"}),
)


@pytest.mark.parametrize(("path", "asked"), TAKEN)
def test_what_they_take_is_taken(client: TestClient, path: str, asked: dict[str, Any]) -> None:
    answer = client.post(path, json={**BASIC[path], **asked})

    assert answer.status_code == 200, answer.text


def test_what_is_ignored_is_named_once_and_counted(
    make_service: Callable[..., Service], engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine._check = lambda *_: None
    client = TestClient(create_app(make_service("{{ messages[0].content }}", 4096)))
    message = {"role": "user", "content": "a", "agent": "x"}
    body = {"messages": [message, message], "num_ctx": 1, "bell\a\n" + "x" * 99: 1, "tools": [TOOL]}
    body |= {"tool_choice": "required"}

    for _ in range(3):
        assert client.post(CHAT, json=body).status_code == 200
    for number in range(200):
        assert client.post("/tokenize", json={"prompt": "a", f"n{number}": 1}).status_code == 200
    client.post(COMPLETIONS, json={"prompt": "a", **{f"many{number}": 1 for number in range(1000)}})

    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == len(set(told)) == 100
    named = "\n".join(told)
    for words in ("Message.agent", "Request.num_ctx", "Request.bell\\x07\\nxxx", "shows the model no tools"):
        assert words in named
    assert max(map(len, told)) < 200
    assert "aotgaudi_ignored_members_total 228.0" in client.get("/metrics").text


@pytest.mark.parametrize("path", BASIC)
def test_every_value_that_asks_for_nothing_is_taken(client: TestClient, path: str) -> None:
    """A client that sends all defaults of vLLM's protocol."""
    defaults = {
        COMPLETIONS: {
            "return_token_ids": False,
            "detokenize": True,
            "vllm_xargs": {},
            "session_id": None,
            "n": 1,
            "best_of": 1,
            "echo": False,
            "suffix": None,
            "logprobs": None,
            "logit_bias": {},
            "presence_penalty": 0,
            "frequency_penalty": 0.0,
            "response_format": {"type": "text"},
            "prompt_embeds": None,
            "bad_words": None,
            "user": "u",
        },
        CHAT: {"return_token_ids": False, "documents": [], "mm_processor_kwargs": {}, "detokenize": None},
    }[path]

    assert client.post(path, json={**BASIC[path], **defaults}).status_code == 200


def lagging(request_id: str) -> list[TokenEvent]:
    """Tokens "abc", " de" and "!", whose text comes a character late, as it does beside a stop string."""
    values = TokenLogprobs(logprob=-1.0, rank=1, top=())
    pieces = ((97, ""), (98, "a"), (99, "bc"))
    events = [token(request_id, text, token_id, logprobs=(values,)) for token_id, text in pieces]
    return [*events, token(request_id, finish_reason="stop")]


def test_text_offsets_are_those_of_the_tokens_streamed_or_not(client: TestClient, engine: Any) -> None:
    engine.script = lagging
    body = {"prompt": "a", "logprobs": 0, "stop": ["\n\n"]}

    whole = client.post(COMPLETIONS, json=body).json()["choices"][0]["logprobs"]["text_offset"]
    streamed = [
        offset
        for event in events_of(client.post(COMPLETIONS, json={**body, "stream": True}).text)
        for choice in event["choices"]
        for offset in choice["logprobs"]["text_offset"]
    ]

    assert whole == streamed == [0, 1, 2]


def cut_off(request_id: str) -> list[TokenEvent]:
    return [token(request_id, "[", 1, finish_reason="length")]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_call_that_is_cut_off_ends_by_length(client: TestClient, engine: Any, choice: Any) -> None:
    engine.script = cut_off
    body = {**BASIC[CHAT], "tools": [TOOL], "tool_choice": choice, "max_completion_tokens": 1}

    (answer,) = client.post(CHAT, json=body).json()["choices"]

    assert answer["finish_reason"] == "length"
    assert not answer["message"]["content"]


def test_each_choice_of_a_chat_stream_has_one_role_and_one_end(client: TestClient) -> None:
    body = {**BASIC[CHAT], "n": 2, "stream": True, "stream_options": {"include_usage": True}}

    events = events_of(client.post(CHAT, json=body).text)

    choices = [choice for event in events for choice in event["choices"]]
    for index in range(2):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] for choice in own].count("stop") == 1
        assert own[-1]["finish_reason"] == "stop"
    assert (events[-1]["choices"], events[-1]["usage"]["total_tokens"] > 0) == ([], True)


def test_the_table_names_tests_that_exist(pytestconfig: pytest.Config) -> None:
    page = (pytestconfig.rootpath / "docs" / "openai-cases.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py)::(\w+)`", page))

    assert len(named) > 20
    missing = [
        f"{path}::{name}"
        for path, name in sorted(named)
        if f"def {name}(" not in Path(pytestconfig.rootpath / "tests" / path).read_text(encoding="utf-8")
    ]
    assert missing == []
