"""Bad inputs get 400 (or 413, 415, 404) with OpenAI's error body that names the parameter."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from aotgaudi.engine.sampling_params import StructuredOutputs
from aotgaudi.errors import RequestError
from aotgaudi.server.app import create_app
from aotgaudi.server.preprocess.body import parse_body
from aotgaudi.server.preprocess.messages import Message
from aotgaudi.server.preprocess.protocol import ChatCompletionRequest, CompletionRequest
from aotgaudi.server.service import Service
from tests.unit.server.conftest import assert_refused

HI = [{"role": "user", "content": "hi"}]

BAD_COMPLETIONS = [
    ({"prompt": None}, "prompt", "valid string"),
    ({"prompt": 5}, "prompt", "valid string"),
    ({"prompt": []}, "prompt", "at least 1 item"),
    ({"prompt": [[]]}, "prompt[0]", "at least 1 item"),
    ({"prompt": [1, "a"]}, "prompt[1]", "valid integer"),
    ({"prompt": ["a", 1]}, "prompt[1]", "valid string"),
    ({"prompt": [1, -1]}, "prompt[1]", "greater than or equal to 0"),
    ({"prompt": [True]}, "prompt[0]", "valid integer"),
    ({"prompt": ["a"] * 65}, "prompt", "at most 64 items"),
    ({"prompt": "a" * 100}, "prompt", "max_model_len = 64"),
    ({"prompt": "a" * 1000}, "prompt", "max_model_len = 64"),
    ({"prompt": [1] * 65}, "prompt", "65 tokens; max_model_len = 64"),
    ({"prompt": "", "add_special_tokens": False}, "prompt", "empty"),
    (
        {"structured_outputs": {"json": {}}},
        "structured_outputs",
        "no setting of sampler.settings in the spec of its bundle has constraints = true",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of json, regex,"),
    ({"structured_outputs": {"jsno": {}}}, "structured_outputs", "exactly one of json, regex,"),
    (
        {"structured_outputs": {"json": {}, "whitespace_pattern": "x"}},
        "structured_outputs.whitespace_pattern",
        "not supported by this server",
    ),
    (
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        "guided_regex",
        "'response_format' and 'guided_regex' both say what the answer must be",
    ),
    ({"guided_choice": []}, "guided_choice", "1 to 2048 texts"),
    ({"guided_json": 5}, "guided_json", "valid JSON Schema: an object, or its text"),
    ({"guided_grammar": "a" * 131073}, "guided_grammar", "at most 131072 characters"),
    ({"response_format": {"type": "xml"}}, "response_format", "'json_object'"),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "Missing required parameter",
    ),
    ({"min_tokens": 17}, "min_tokens", "at most max_tokens = 16"),
    ({"min_tokens": 3}, "min_tokens", "constraints = true"),
    ({"bad_words": ["b"]}, "bad_words", "constraints = true"),
    ({"bad_words": [""]}, "bad_words[0]", "at least 1 character"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids", "constraints = true"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least 1 item"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x", "valid integer"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", "at most 300 items"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": "3"}, "max_tokens", "valid integer"),
    ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
    ({"max_tokens": 100}, "max_tokens", "max_model_len = 64"),
    ({"temperature": 2.1}, "temperature", "from 0 to 2"),
    ({"temperature": -1}, "temperature", "from 0 to 2"),
    ({"temperature": "hot"}, "temperature", "valid number"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"top_p": 0}, "top_p", "(0, 1]"),
    ({"top_k": -2}, "top_k", "positive integer"),
    ({"seed": 2**63}, "seed", "64-bit"),
    ({"stop": ["x"] * 17}, "stop", "at most 16 items"),
    ({"stop": [""]}, "stop[0]", "at least 1 character"),
    ({"stop": "x" * 257}, "stop", "at most 256 characters"),
    ({"stop": [1]}, "stop[0]", "valid string"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "greater than or equal to 0"),
    ({"stream": 1}, "stream", "valid boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "'stream' is true"),
    ({"n": 129}, "n", "less than or equal to 128"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"best_of": True}, "best_of", "valid integer"),
    ({"n": 2, "best_of": 3}, "best_of", "only allowed to equal 'n', which is 2"),
    ({"priority": 1}, "priority", "requests run first come, first served"),
    ({"truncate_prompt_tokens": 65}, "truncate_prompt_tokens", "1 to max_model_len = 64, not 65"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "not 0"),
    ({"suffix": "end"}, "suffix", "not supported by this server"),
    ({"logprobs": 0}, "logprobs", "not supported by this server"),
    ({"logit_bias": {"1": 1}}, "logit_bias", "constraints = true"),
    ({"presence_penalty": 0.5}, "presence_penalty", "not supported by this server"),
    ({"min_p": 0.1}, "min_p", "not supported by this server"),
    ({"top_n_sigma": 1}, "top_n_sigma", "has top_n_sigma above 0"),
    ({"top_n_sigma": "1"}, "top_n_sigma", "valid number"),
    ({"top_n_sigma": -1}, "top_n_sigma", "a number from 0 to 100, not -1"),
    ({"max_tokens": 2**63}, "max_tokens", "less than or equal to 9223372036854775807"),
    ({"top_k": 10**4299}, "top_k", "less than or equal to 9223372036854775807"),
    ({"prompt": [2**31]}, "prompt[0]", "less than or equal to 2147483647"),
    ({"metadata": {"a": 1}}, "metadata.a", "valid string"),
    ({"metadata": {"a" * 65: ""}}, f"metadata.{'a' * 64}", "at most 64 characters"),
    ({"metadata": {"a": "b" * 513}}, "metadata.a", "at most 512 characters"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "at most 16 items"),
    ({"response_format": {"type": "json_object"}}, "response_format", "constraints = true"),
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BAD_CHATS = [
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": "hi"}, "messages", "valid array"),
    ({"messages": HI * 2049}, "messages", "at most 2048 items"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 1025}]},
        "messages[0].content",
        "at most 1024 items",
    ),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "Missing"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "Missing"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "'assistant'"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "Missing"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": ""}}]}]},
        "messages[0].tool_calls[0].function.name",
        "at least 1 character",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "A content part of type 'image_url' is not supported by this server yet (supported: text)",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "x" * 100}]}]},
        "messages[0].content[0].type",
        f"A content part of type '{'x' * 64}' is not known (supported: text)",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "image_url": "x"}]}]},
        "messages[0].content[0].text",
        "Missing required parameter",
    ),
    (
        {"prompt_embeds": "a"},
        "prompt_embeds",
        "The parameter 'prompt_embeds' is not supported by this server yet (supported: temperature, top_p, top_k,",
    ),
    ({"messages": [{"role": "user", "content": "a" * 80}]}, "messages", "max_model_len = 64"),
    ({"enable_thinking": False}, "enable_thinking", "'chat_template_kwargs'"),
    ({"top_n_sigma": 0.5}, "top_n_sigma", "has top_n_sigma above 0"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "greater than or equal to 1"),
    ({"max_completion_tokens": 90}, "max_completion_tokens", "max_model_len = 64"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "Missing required parameter"),
    (
        {"tools": [{"type": "web_search", "user_location": {}}]},
        "tools[0].type",
        "A tool of type 'web_search' is not supported by this server yet (supported: function)",
    ),
    ({"tools": [TOOL] * 129}, "tools", "at most 128 items"),
    ({"tools": [TOOL]}, "tool_choice", "--enable-auto-tool-choice"),
    ({"tool_choice": "required"}, "tool_choice", "needs 'tools'"),
    ({"tool_choice": "sometimes"}, "tool_choice", "'required'"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "names the function 'g', which is not one of 'tools'",
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}},
        "tool_choice.type",
        "type 'allowed_tools' is not supported",
    ),
    ({"functions": [{}]}, "functions", "not supported by this server"),
    ({"logprobs": True}, "logprobs", "not supported by this server"),
    ({"chat_template": "x"}, "chat_template", "`serve --chat-template`"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "must not set 'messages'"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "'add_generation_prompt' exclude each other",
    ),
    ({"reasoning_effort": "lowest"}, "reasoning_effort", "'minimal'"),
]


def test_a_refusal_quotes_no_more_than_a_reader_reads(client: TestClient) -> None:
    refusals = [
        client.post("/v1/completions", json={"prompt": "a", "temperature": {"x" * 100_000: 1}}),
        client.post("/v1/completions", json={"prompt": "a", "model": "x" * 100_000}),
        client.post("/v1/completions", content=b"{" * 1000, headers={"content-type": "application/json"}),
        client.post("/v1/chat/completions", json={"messages": [{"role": "x" * 100_000, "content": "a"}]}),
        client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": [{"type": "é" * 9999}]}]}
        ),
    ]

    assert [response.status_code for response in refusals] == [400, 404, 400, 400, 400]
    assert all(len(response.content) < 2048 for response in refusals)


def test_the_reason_of_a_refusal_is_bounded_wherever_it_comes_from() -> None:
    assert len(str(RequestError("x" * 100_000).renamed({}))) < 2048


@pytest.mark.parametrize(("body", "param", "fragment"), BAD_COMPLETIONS)
def test_bad_completion_is_refused(
    client: TestClient, body: dict[str, object], param: str, fragment: str
) -> None:
    assert_refused(client, "/v1/completions", {"prompt": "a", **body}, param, fragment)


@pytest.mark.parametrize(("body", "param", "fragment"), BAD_CHATS)
def test_bad_chat_is_refused(client: TestClient, body: dict[str, object], param: str, fragment: str) -> None:
    assert_refused(client, "/v1/chat/completions", {"messages": HI, **body}, param, fragment)


@pytest.mark.parametrize(("path", "param"), [("completions", "prompt"), ("chat/completions", "messages")])
def test_a_body_without_a_prompt_is_refused(client: TestClient, path: str, param: str) -> None:
    assert_refused(client, f"/v1/{path}", {}, param, f"Missing required parameter: '{param}'")


BAD_JSON = [
    *(
        (raw, None, "not valid JSON")
        for raw in (
            b"",
            b"{",
            b'{"prompt": "a"',
            b"nonsense",
            b"\xff\xfe",
            b'{"prompt": "\\ud800"}',
            b"[" * 100_000,
        )
    ),
    *((raw, None, "must be a JSON object") for raw in (b"[]", b"1", b"null", b'"text"')),
    *(
        (b'{"prompt": "a", "temperature": %b}' % number, "temperature", "")
        for number in (b"NaN", b"Infinity", b"1e999")
    ),
]


@pytest.mark.parametrize(("raw", "param", "fragment"), BAD_JSON)
def test_bad_json_is_refused(client: TestClient, raw: bytes, param: str | None, fragment: str) -> None:
    assert_refused(client, "/v1/completions", raw, param, fragment)


@pytest.mark.parametrize(
    ("unit", "message"),
    [
        (b"{}", "1398102 objects and arrays; at most 32768 are read"),
        (b'"a"', "1048576 strings; at most 65536 are read"),
        (b"7", "2097151 values; at most 524288 are read"),
    ],
)
def test_body_of_too_many_values_is_refused_before_they_are_made(unit: bytes, message: str) -> None:
    raw = b"[" + b",".join([unit] * (4 * 1024 * 1024 // (len(unit) + 1))) + b"]"

    began = time.process_time()
    with pytest.raises(RequestError, match=message):
        parse_body(ChatCompletionRequest, raw)
    assert time.process_time() - began < 0.5


def test_brackets_and_quotes_in_long_text_count_for_nothing() -> None:
    text = '[{"a\\": [1,2,"\\\\"]}]' * 50_000

    request = parse_body(CompletionRequest, json.dumps({"prompt": text}).encode())

    assert request.prompt == text


@pytest.mark.parametrize("content_type", ["text/plain", "", "application/x-www-form-urlencoded"])
def test_other_content_type_is_refused(client: TestClient, content_type: str) -> None:
    response = client.post("/v1/completions", content=b"{}", headers={"content-type": content_type})

    assert response.status_code == 415
    assert response.json()["error"]["code"] == 415


@pytest.mark.parametrize("is_chunked", [False, True])
def test_large_body_is_refused(make_service: Callable[..., Service], is_chunked: bool) -> None:
    client = TestClient(create_app(make_service(max_body_bytes=100)))
    raw = json.dumps({"prompt": "a" * 200}).encode()
    content = iter([raw[:50], raw[50:]]) if is_chunked else raw

    response = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})

    assert response.status_code == 413
    assert "100 bytes" in response.json()["error"]["message"]


def test_body_of_the_exact_limit_is_read(make_service: Callable[..., Service]) -> None:
    raw = json.dumps({"prompt": "a"}).encode()
    client = TestClient(create_app(make_service(max_body_bytes=len(raw))))

    response = client.post("/v1/completions", content=raw, headers={"content-type": "application/json"})

    assert response.status_code == 200


def test_unknown_model_is_404(client: TestClient) -> None:
    response = client.post("/v1/completions", json={"model": "gpt-9", "prompt": "a"})

    assert response.status_code == 404
    assert (response.json()["error"]["type"], response.json()["error"]["code"]) == ("NotFoundError", 404)
    assert "tiny" in response.json()["error"]["message"]


COMPLETION, CHAT = {"prompt": "a"}, {"messages": HI}


def test_answer_message_can_be_sent_back(client: TestClient) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": HI}).json()["choices"][0]["message"]

    response = client.post("/v1/chat/completions", json={"messages": [*HI, answer, *HI]})

    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (COMPLETION, {"max_tokens": 16, "temperature": 1.0}),
        (CHAT, {"max_tokens": None, "temperature": 1.0}),
        (
            {**CHAT, "temperature": 0.5, "top_p": 0.9, "top_k": 3},
            {"temperature": 0.5, "top_p": 0.9, "top_k": 3},
        ),
        ({**CHAT, "seed": 7, "ignore_eos": True}, {"seed": 7, "ignore_eos": True}),
        ({**CHAT, "stop": "x", "stop_token_ids": [1, 2]}, {"stop": ("x",), "stop_token_ids": (1, 2)}),
        ({**CHAT, "max_completion_tokens": 5}, {"max_tokens": 5}),
        (
            {**COMPLETION, "min_tokens": 2, "bad_words": ["b", "c"]},
            {"min_tokens": 2, "bad_words": ("b", "c")},
        ),
        ({**COMPLETION, "allowed_token_ids": [3, 1]}, {"allowed_token_ids": (3, 1)}),
        ({**COMPLETION, "logit_bias": {"7": -1.5}}, {"logit_bias": ((7, -1.5),)}),
    ],
)
def test_every_parameter_reaches_the_engine_or_has_the_default_of_its_protocol(
    body: dict[str, object], expected: dict[str, object]
) -> None:
    kind = CompletionRequest if "prompt" in body else ChatCompletionRequest

    params = parse_body(kind, json.dumps(body).encode()).sampling_params()

    assert {name: getattr(params, name) for name in expected} == expected


_SCHEMA = {"type": "object", "properties": {"b": {}, "a": {"const": 1.5}}}
_SCHEMA_TEXT = '{"type":"object","properties":{"b":{},"a":{"const":1.5}}}'
_JSON_SCHEMA = {"name": "answer", "strict": True, "description": "x", "schema": _SCHEMA}


@pytest.mark.parametrize(
    ("stated", "meant"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": _JSON_SCHEMA}},
            StructuredOutputs(json=_SCHEMA_TEXT),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}},
            StructuredOutputs(json_object=True),
        ),
        ({"structured_outputs": {"json": _SCHEMA}}, StructuredOutputs(json=_SCHEMA_TEXT)),
        ({"structured_outputs": {"json": _SCHEMA_TEXT}}, StructuredOutputs(json=_SCHEMA_TEXT)),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutputs(regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputs(choice=("a", "b"))),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, StructuredOutputs(grammar='start: "a"')),
        ({"structured_outputs": {"json_object": True}}, StructuredOutputs(json_object=True)),
        ({"guided_json": _SCHEMA}, StructuredOutputs(json=_SCHEMA_TEXT)),
        ({"guided_regex": "a+"}, StructuredOutputs(regex="a+")),
        ({"guided_choice": ["a", "b"]}, StructuredOutputs(choice=("a", "b"))),
        ({"guided_grammar": 'start: "a"'}, StructuredOutputs(grammar='start: "a"')),
    ],
)
def test_what_the_answer_must_be_has_several_names(
    stated: dict[str, object], meant: StructuredOutputs | None
) -> None:
    body = parse_body(ChatCompletionRequest, json.dumps({"messages": HI, **stated}).encode())

    assert body.sampling_params().structured_outputs == meant


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_NAMES = st.sampled_from(sorted(CompletionRequest.model_fields)) | st.text(max_size=5)


@given(st.dictionaries(_NAMES, _JSON, max_size=5))
def test_any_json_is_read_or_refused_with_a_reason(body: dict[str, object]) -> None:
    refusals: list[RequestError] = []
    try:
        parse_body(CompletionRequest, json.dumps(body).encode())
    except RequestError as error:
        refusals.append(error)

    assert all(refusal.http_status == 400 and str(refusal) for refusal in refusals)


def test_the_parts_of_a_message_are_joined_by_a_line_feed() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts, "name": "Ann"}

    variables = Message.model_validate(message).as_variables()

    assert variables == {"role": "user", "content": "a\nb", "name": "Ann"}


def test_the_table_of_what_stays_refused_is_whole(pytestconfig: pytest.Config) -> None:
    page = (pytestconfig.rootpath / "docs" / "how-to" / "serve.md").read_text(encoding="utf-8")
    table = page.partition("### What stays refused")[2].partition("\n###")[0]
    bodies = (CompletionRequest, ChatCompletionRequest)

    refused = {name for body in bodies for name in body.not_yet}
    neutral = {
        name
        for body in bodies
        for name, field in body.model_fields.items()
        if field.annotation is object and field.metadata
    }

    assert [
        name for name in sorted(refused | neutral) if f"`{name}`" not in table and f"`{name}:" not in table
    ] == []
